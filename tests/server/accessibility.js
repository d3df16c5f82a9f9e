// What a checker of accessibility would look at, run in the page. Returns a list of faults, as sentences.
(pairs) => {
  const faults = [];
  const name = (element) => `<${element.tagName.toLowerCase()} id="${element.id}" class="${element.getAttribute("class") ?? ""}">`;
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const all = (selector) => [...document.querySelectorAll(selector)].filter(shown);

  if (!document.documentElement.lang || !document.title) faults.push("the page has no language or no title");
  if (all("h1").length !== 1 || all("main").length !== 1) faults.push("the page needs one h1 and one main");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  ids.filter((id, place) => ids.indexOf(id) !== place).forEach((id) => faults.push(`two elements have the id ${id}`));

  for (const element of all("input, textarea, button, summary, [tabindex]:not(.token)")) {
    const labels = [...(element.labels ?? [])].map((label) => label.textContent);
    const own = element.matches("button, summary") ? [element.textContent] : [];
    const text = [element.getAttribute("aria-label") ?? "", ...labels, ...own].join("").trim();
    if (!text) faults.push(`${name(element)} has no name`);
    if (element.tabIndex > 0) faults.push(`${name(element)} takes itself out of the order`);
  }
  for (const attribute of ["aria-describedby", "aria-controls", "aria-labelledby", "for"]) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      if (!document.getElementById(element.getAttribute(attribute))) faults.push(`${name(element)}: ${attribute} points nowhere`);
    }
  }
  for (const group of all("[role=radiogroup], [role=group], [role=region], aside")) {
    if (!group.getAttribute("aria-label")) faults.push(`${name(group)} is a group without a name`);
  }

  // Colours come as rgb(), oklab() and color(): a canvas reads them all.
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const luminance = ([r, g, b]) => [r, g, b].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  for (const [selector, property, least] of pairs) {
    const elements = all(selector);
    if (!elements.length) faults.push(`nothing matches ${selector}`);
    for (const element of elements) {
      const behind = background(property === "color" ? element : element.parentElement);
      const [high, low] = [rgba(getComputedStyle(element)[property]), behind].map(luminance).sort((a, b) => b - a);
      const ratio = (high + 0.05) / (low + 0.05);
      if (ratio < least) faults.push(`${name(element)}: ${property} has a contrast of ${ratio.toFixed(2)}, less than ${least}`);
    }
  }
  return [...new Set(faults)];
};

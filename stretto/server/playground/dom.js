// Building elements without markup in strings, and numbers as people read them.

/**
 * An element with properties and children. Keys with a dash, and `role`, are set as attributes.
 * @param {string} tag @param {Object<string, *>} properties @param {...(Node|string)} children
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "for") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

/** An SVG element with attributes. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Three significant digits; thousands with separators. */
export function three(value) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const exponent = Math.floor(Math.log10(Number(Math.abs(value).toPrecision(3))));
  const decimals = Math.max(0, 2 - exponent);
  return value.toLocaleString("en-GB", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** With an SI prefix: `12.3M`; with a unit, `4.56 GFLOPs`. */
export function si(value, unit = "") {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < PREFIXES.length - 1) [value, power] = [value / 1000, power + 1];
  return `${power === 0 && Number.isInteger(value) ? value : three(value)}${unit ? " " : ""}${PREFIXES[power]}${unit}`;
}

/** A number of parameters: `3.41M`, `1.20B`. */
export const params = (value) => si(value).replace("G", "B");

/** Binary units: `768 B`, `1.50 KiB`. */
export function bytes(value) {
  let power = 0;
  while (value >= 1000 && power < 4) [value, power] = [value / 1024, power + 1];
  return `${Number.isInteger(value) ? value : three(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** `34 %`, one decimal below ten, and never a `0 %` for what is not nothing. */
export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.05) return "< 0.1 %";
  return `${value >= 9.95 ? value.toFixed(0) : value.toFixed(1)} %`;
}

/** `18 ms`, `2.41 s`. */
export const seconds = (value) => (value < 0.9995 ? `${Math.max(1, Math.round(1000 * value))} ms` : `${three(value)} s`);

/** `1 token`, `3 tokens`. */
export const counted = (number, noun) => `${number.toLocaleString("en-GB")} ${noun}${number === 1 ? "" : "s"}`;

// Loaded before anything is drawn, so that a chosen theme does not flash. Everything else is a module.
{
  const chosen = localStorage.getItem("stretto.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

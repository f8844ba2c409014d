// Sets the colours before anything is drawn, so that a dark page does not flash white. A classic script on purpose.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("powerinfer.theme");
  } catch {
    // No storage in this browser: the system's colours.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();

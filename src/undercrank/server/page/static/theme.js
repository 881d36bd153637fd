// Runs before the first paint, so that no page flashes in the wrong colours.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    document.documentElement.dataset.theme = localStorage.getItem("theme") || (system.matches ? "dark" : "light");
  };
  show();
  system.addEventListener("change", show);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    if ((next === "dark") === system.matches) localStorage.removeItem("theme");
    else localStorage.setItem("theme", next);
    show();
  });
})();

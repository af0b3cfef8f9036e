// Runs before the page is drawn: sets the theme chosen here, or the system's.
"use strict";
(() => {
  const root = document.documentElement;
  const apply = (theme) => theme ? root.setAttribute("data-theme", theme) : root.removeAttribute("data-theme");
  let chosen = "";
  try { chosen = localStorage.getItem("theme") || ""; } catch { /* storage is forbidden: as the system */ }
  apply(chosen);
  window.changeTheme = () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const order = dark ? ["", "light", "dark"] : ["", "dark", "light"];
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try { localStorage.setItem("theme", chosen); } catch { /* it holds for this page */ }
    apply(chosen);
    document.dispatchEvent(new CustomEvent("themechange"));
  };
})();

/*
 * Light or dark: what the system asks for, until the visitor chooses. Runs before the first paint, hence no module.
 */
(() => {
  "use strict";
  const KEY = "kog-theme";
  const root = document.documentElement;

  /** localStorage throws where the browser keeps nothing. */
  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function remember(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // the choice then lasts until the page is left
    }
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = current() === "dark" ? "Light" : "Dark";
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      remember(root.dataset.theme);
      label();
    });
    system.addEventListener("change", label);
    label();
  });
})();

// A classic script in the head: the colours are right before anything is painted.
"use strict";
{
  const root = document.documentElement;
  const order = ["system", "light", "dark"];
  let chosen = "system";
  try {
    chosen = localStorage.getItem("pocketllm-theme") ?? "system";
  } catch {
    // Storage is refused in some private windows: the system's colours it is.
  }

  const apply = () => {
    if (chosen === "system") delete root.dataset.theme;
    else root.dataset.theme = chosen;
    dispatchEvent(new Event("themechange"));
  };

  window.pocketTheme = {
    get chosen() {
      return chosen;
    },
    next() {
      chosen = order[(order.indexOf(chosen) + 1) % order.length];
      try {
        localStorage.setItem("pocketllm-theme", chosen);
      } catch {
        // It then lasts as long as the page.
      }
      apply();
    },
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

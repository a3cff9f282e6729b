/** Light, dark, or as the system says. The choice is kept in the browser where that is allowed. */
import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";
const KEY = "verbatim-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function stored(): Theme {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // a page from disk, or a browser that keeps nothing
  }
}

function apply(theme: Theme): void {
  const shown = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = shown;
}

apply(stored());

/** The choice, how to change it, and a number that grows when the shown colours change. */
export function useTheme(): { theme: Theme; choose: (theme: Theme) => void } {
  const [theme, set] = useState(stored);
  useEffect(() => {
    const changed = () => {
      apply(theme);
      dispatchEvent(new Event("verbatim:colours"));
    };
    changed();
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, [theme]);
  const choose = (next: Theme) => {
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // it holds until the page is closed
    }
    set(next);
  };
  return { theme, choose };
}

/** Grows whenever the shown colours change: for what draws on a canvas. */
export function useColours(): number {
  const [times, set] = useState(0);
  useEffect(() => {
    const changed = () => set((n) => n + 1);
    addEventListener("verbatim:colours", changed);
    return () => removeEventListener("verbatim:colours", changed);
  }, []);
  return times;
}

export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

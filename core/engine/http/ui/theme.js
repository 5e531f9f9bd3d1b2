// Before the first paint: the theme that was chosen the last time. Without one, the system's.
try {
  const chosen = localStorage.getItem("engine-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* no storage: the system's */ }

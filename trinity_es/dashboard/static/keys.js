// Keyboard: rows, pages and navigation. Every element that it reaches can be clicked too.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  let waiting = 0;   // deadline for the key after g
  let chosen = "";   // data-key of the chosen row, which outlives a refresh

  const rows = () => [...document.querySelectorAll("table.rows [data-href]")].filter((r) => r.offsetParent !== null);
  const mark = (row, show) => {
    document.querySelectorAll("[data-href].chosen").forEach((r) => { r.classList.remove("chosen"); r.removeAttribute("aria-selected"); });
    if (!row) return;
    chosen = row.dataset.key || row.dataset.href;
    row.classList.add("chosen");
    row.setAttribute("aria-selected", "true");
    if (show) row.scrollIntoView({block: "nearest"});
  };
  const find = () => rows().find((r) => (r.dataset.key || r.dataset.href) === chosen);
  const move = (step) => {
    const all = rows();
    if (!all.length) return;
    const at = all.indexOf(find());
    mark(all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step))], true);
  };
  const follow = (selector) => { const a = document.querySelector(selector); if (a) a.click(); return !!a; };

  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const typing = e.target.closest("input, select, textarea, [contenteditable]");
    if (typing) { if (e.key === "Escape") e.target.blur(); return; }
    if (waiting > performance.now()) {
      waiting = 0;
      if (follow(`[data-go="${CSS.escape(e.key)}"]`)) e.preventDefault();
      return;
    }
    const help = $("help");
    let done = true;
    switch (e.key) {
      case "g": waiting = performance.now() + 1500; break;
      case "j": move(1); break;
      case "k": move(-1); break;
      case "Enter": {
        if (e.target.closest("a, button, summary, [tabindex='0']")) { done = false; break; }
        const row = find();
        if (row) location.href = row.dataset.href; else done = false;
        break;
      }
      case "[": follow("a[rel=prev]"); break;
      case "]": follow("a[rel=next]"); break;
      case "u": follow("a[data-up]"); break;
      case "t": changeTheme(); break;
      case "/": { const box = document.querySelector("[data-filter]"); if (box) box.focus(); else done = false; break; }
      case "?": if (help.open) help.close(); else help.showModal(); break;
      default: done = false;
    }
    if (done) e.preventDefault();
  });
  document.addEventListener("click", (e) => {
    const row = e.target.closest("[data-href]");
    if (row && !e.target.closest("a, button, input, label") && !String(getSelection())) {
      if (e.metaKey || e.ctrlKey) open(row.dataset.href, "_blank", "noopener"); else location.href = row.dataset.href;
    }
  });
  document.addEventListener("change", (e) => { if (e.target.matches("form.filter select")) e.target.form.requestSubmit(); });
  let opened = [];  // open details stay open
  document.addEventListener("htmx:beforeSwap", () => {
    opened = [...document.querySelectorAll("#live details[id]")].filter((d) => d.open).map((d) => d.id);
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const id of opened) { const details = $(id); if (details) details.open = true; }
    if (chosen) mark(find(), false);
  });
  $("theme").addEventListener("click", () => changeTheme());
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("help").addEventListener("click", (e) => { if (e.target === $("help")) $("help").close(); });
})();

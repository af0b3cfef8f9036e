// Events of a batch: arrow keys, slider or click choose one, and the server sends the state as of it.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const section = $("history"), slider = $("along"), steps = $("steps");
  const ref = encodeURIComponent(section.dataset.ref), format = new Intl.NumberFormat("en-US");
  let n = document.querySelector("#asof .asof") ? Number(slider.value) : 0;
  let timer = 0, asking = false, asked = 0;

  const total = () => Number(slider.max);
  const mark = () => {
    steps.querySelectorAll(".now").forEach((row) => { row.classList.remove("now"); row.removeAttribute("aria-current"); });
    const row = steps.querySelector(`tr[data-n="${n}"]`);
    if (row) { row.classList.add("now"); row.setAttribute("aria-current", "step"); }
    if (!row) return;
    const box = steps.closest(".steps-box"), head = 26;
    if (row.offsetTop < box.scrollTop + head) box.scrollTop = row.offsetTop - head;
    else if (row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = row.offsetTop + row.offsetHeight - box.clientHeight;
  };
  const tell = () => { $("which").textContent = `${format.format(n || total())} of ${format.format(total())}`; };
  const ask = () => {  // fetches the newest choice; choices made during a fetch are skipped except the last
    if (asking || asked === n) return;
    asking = true;
    const what = n;
    fetch(`/batch/asof?id=${ref}&n=${what}`, {headers: {"HX-Request": "true"}})
      .then((answer) => answer.ok ? answer.text() : Promise.reject())
      .then((html) => {
        if (what === n || !document.querySelector("#asof .asof")) $("asof").innerHTML = html;
        asked = what;
        const found = document.querySelector("#asof .asof");
        const query = new URLSearchParams(location.search);
        query.set("at", found.dataset.position);
        history.replaceState(null, "", `${location.pathname}?${query}`);
      }, () => { asked = 0; })
      .finally(() => { asking = false; if (asked && asked !== n) ask(); });
  };
  const go = (to) => {
    n = Math.min(total(), Math.max(1, to));
    slider.value = n;
    tell();
    mark();
    clearTimeout(timer);
    timer = setTimeout(ask, 30);
  };
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input:not([type=range]), select, textarea") || $("help").open) return;
    const step = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (!step) return;
    e.preventDefault();
    const seen = section.getBoundingClientRect();
    if (seen.top < 42 || seen.top + 120 > innerHeight) section.scrollIntoView({block: seen.height < innerHeight - 60 ? "end" : "start"});
    go(n ? n + step * (e.shiftKey ? 10 : 1) : step > 0 ? 1 : total());
  });
  slider.addEventListener("input", () => go(Number(slider.value)));
  $("back").addEventListener("click", () => go(n ? n - 1 : total()));
  $("forth").addEventListener("click", () => go(n ? n + 1 : 1));
  steps.addEventListener("click", (e) => {
    const row = e.target.closest("tr[data-n]");
    if (row) go(Number(row.dataset.n));
  });

  // --- new events are added at the end, each once: the fetch begins after the last row
  let adding = false, again = false;
  const add = () => {
    if (adding) { again = true; return; }
    const later = steps.querySelector("tr.later");
    const last = steps.querySelector("tr[data-n]:last-of-type") || [...steps.querySelectorAll("tr[data-n]")].pop();
    adding = true;
    const first = last ? Number([...steps.querySelectorAll("tr[data-n]")].pop().dataset.n) + 1 : 1;
    fetch(`/batch/steps?id=${ref}&first=${first}`, {headers: {"HX-Request": "true"}})
      .then((answer) => answer.ok ? answer.text() : Promise.reject())
      .then((html) => {
        const box = steps.closest(".steps-box");
        const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
        const parsed = document.createElement("template");
        parsed.innerHTML = `<table><tbody>${html}</tbody></table>`;
        const rows = parsed.content.querySelectorAll("tr");
        const fresh = [...rows].filter((row) => row.dataset.n && Number(row.dataset.n) >= first);
        const more = [...rows].find((row) => row.dataset.total);
        const end = more ? Number(more.dataset.total) : fresh.length ? Number(fresh[fresh.length - 1].dataset.n) : total();
        if (!later && steps.rows.length < 2000) { steps.append(...fresh, ...(more ? [more] : [])); htmx.process(steps); }
        slider.max = String(Math.max(total(), end));
        if (!n) slider.value = slider.max;
        tell();
        if (atEnd && !n) box.scrollTop = box.scrollHeight;
      }, () => {})
      .finally(() => { adding = false; if (again) { again = false; setTimeout(add, 300); } });
  };
  document.addEventListener("log", (e) => {
    const streams = e.detail.streams;
    if (streams === null || streams.includes(section.dataset.stream)) add();
  });
  if (n) { mark(); asked = n; section.scrollIntoView({block: "end"}); } else { const box = steps.closest(".steps-box"); if (!document.querySelector("#live .s-finalized, #live .s-aborted")) box.scrollTop = box.scrollHeight; }
})();

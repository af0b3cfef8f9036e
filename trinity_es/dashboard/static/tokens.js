// Describes the token under the pointer or the arrow keys below the tokens.
"use strict";
(() => {
  const say = (token) => {
    const box = token.closest("[data-tokens]");
    box.querySelectorAll(".on").forEach((t) => t.classList.remove("on"));
    token.classList.add("on");
    const out = document.getElementById("token-said");
    if (out) out.textContent = JSON.stringify(token.textContent) + "  " + token.title;
  };
  const find = (e) => e.target.closest && e.target.closest("[data-tokens] .t");
  document.addEventListener("mouseover", (e) => { const t = find(e); if (t) say(t); });
  document.addEventListener("click", (e) => { const t = find(e); if (t) say(t); });
  document.addEventListener("focusin", (e) => {
    if (e.target.matches("[data-tokens]") && !e.target.querySelector(".on") && e.target.firstElementChild) say(e.target.firstElementChild);
  });
  document.addEventListener("keydown", (e) => {
    const box = e.target.closest && e.target.closest("[data-tokens]");
    const step = {ArrowRight: 1, ArrowLeft: -1}[e.key];
    if (!box || !step || e.ctrlKey || e.metaKey || e.altKey) return;
    const on = box.querySelector(".on");
    const next = on ? (step > 0 ? on.nextElementSibling : on.previousElementSibling) : box.firstElementChild;
    if (next) { say(next); next.scrollIntoView({block: "nearest"}); }
    e.preventDefault();
  });
})();

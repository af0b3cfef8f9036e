// Listens to server-sent events of the log and reloads the live part of the page.
//
// Each message's id is the log's position. A browser that reconnects sends the last one; if it has given up, this script
// reconnects from the same position. So no event is missed, and #since counts them.
"use strict";
(() => {
  const body = document.body;
  const first = Number(body.dataset.position);
  const watch = "watch" in body.dataset ? JSON.parse(body.dataset.watch) : null;
  const $ = (id) => document.getElementById(id);
  const format = new Intl.NumberFormat("en-US");
  let position = first, counted = 0, source = null, again = 0;
  let wanted = false, running = false, failed = false, held = 0, last = 0, took = 0, timer = 0;

  const dot = (state, said) => {
    $("dot").className = "dot " + state;
    $("dot").setAttribute("aria-label", said);
    $("dot").title = said;
  };
  const notice = (text) => {
    const over = !text && !$("notice").hidden;
    $("notice").textContent = text;
    $("notice").hidden = !text;
    if (!text && wanted) refresh();
    if (over && document.querySelector("#live[data-again]")) location.reload();
  };

  // --- the live part: one reload at a time, with pauses that leave the server time for others
  const selecting = () => {  // a selection delays the reload for some seconds, so that it can be copied
    const chosen = getSelection();
    if (!chosen || chosen.isCollapsed || !$("live").contains(chosen.anchorNode)) { held = 0; return false; }
    held = held || performance.now();
    return performance.now() - held < 15000;
  };
  const refresh = () => {
    if (!$("live")) return;
    wanted = true;
    if (running || timer || document.hidden) return;
    if (selecting()) { setTimeout(refresh, 500); return; }
    const wait = Math.max(0, last + Math.max(400, 3 * took) - performance.now());
    timer = setTimeout(() => {
      timer = 0;
      if (!wanted || !$("live")) return;
      wanted = false;
      running = true;
      failed = false;
      const began = performance.now();
      htmx.ajax("GET", location.pathname + location.search, {target: "#live", select: "#live", swap: "outerHTML show:none"})
        .catch(() => { failed = true; })
        .finally(() => {
          running = false;
          last = performance.now();
          took = last - began;
          if (failed) { wanted = true; setTimeout(refresh, 2000); } else if (wanted) refresh();
        });
    }, wait);
  };
  const concerns = (streams) => watch === null || streams === null && watch.length > 0
    || (streams || []).some((s) => watch.some((w) => s === w || w.endsWith("/") && s.startsWith(w)));

  // --- the stream
  const connect = () => {
    if (document.hidden) return;
    if (source) source.close();
    source = new EventSource(`/live?after=${position}&log=${encodeURIComponent(body.dataset.generation)}`);
    source.onopen = () => { again = 0; dot("on", "live"); if (wanted) refresh(); };
    source.onerror = () => {
      dot("off", "the dashboard does not answer; trying again");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(connect, Math.min(10000, 500 * 2 ** again++));
      refresh();  // a restarted server may need another token, and its answer says so
    };
    source.addEventListener("log", (message) => {
      const news = JSON.parse(message.data);
      position = news.position;
      counted += news.events;
      $("position").textContent = format.format(position);
      $("since").textContent = "+" + format.format(counted);
      document.dispatchEvent(new CustomEvent("log", {detail: news}));
      if (concerns(news.streams)) refresh();
    });
    source.addEventListener("notice", (message) => notice(JSON.parse(message.data).text));
    source.addEventListener("reset", () => location.reload());
  };
  document.addEventListener("visibilitychange", () => {  // a browser has few connections to one server
    if (document.hidden) { if (source) source.close(); source = null; dot("", "asleep"); } else { connect(); if (wanted) refresh(); }
  });
  document.addEventListener("htmx:responseError", (e) => {
    failed = true;
    if (e.detail.xhr.status === 401) location.reload();
  });
  document.addEventListener("htmx:sendError", () => { failed = true; });
  // Waiting times are shown, and a dead run writes no event that would update them.
  setInterval(() => { if (document.querySelector("#live .opens, #live .waits, #live .s-idle")) refresh(); }, 5000);
  addEventListener("pagehide", () => source && source.close());
  addEventListener("pageshow", (e) => { if (e.persisted) location.reload(); });
  if (document.hidden) dot("", "asleep"); else connect();
})();

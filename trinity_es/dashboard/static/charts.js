// Charts: each <div class="chart" data-from="ID"> draws the JSON in the element ID, again whenever that changes.
"use strict";
(() => {
  const drawn = new Map();  // element -> {plot, text}
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = (label, size) => ({
    stroke: css("--dim"), grid: {stroke: css("--line"), width: 1}, ticks: {show: false}, size, gap: 4,
    font: "11px system-ui, sans-serif", label: undefined, _name: label,
  });
  const short = (v) => v == null ? "–" : Math.abs(v) >= 1e4 ? (v / 1e3).toFixed(0) + "k" : Math.abs(v) >= 100 ? v.toFixed(0) : +v.toPrecision(4) + "";
  const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((m) => m * 10 ** k));  // there is no step 1.5
  const two = (n) => String(n).padStart(2, "0");
  const hour = (at, zone, exact) => {  // in the zone of the page, which may not be the browser's
    const d = new Date((at + zone) * 1000);
    return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}` + (exact ? `:${two(d.getUTCSeconds())}` : "");
  };
  const options = (chart, element) => ({
    width: element.clientWidth, height: Number(element.dataset.height || 170), padding: [8, chart.time ? 30 : 14, 0, 0],
    cursor: {y: false, points: {size: 6}, drag: {x: true, y: false}},
    legend: {live: true},
    scales: {x: {time: !!chart.time}, y: {range: (u, low, high) => {
      if (low == null) return [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [chart.zero ? Math.min(0, low) : low - room, high + room];
    }}},
    axes: [{...axis(chart.x, 26), ...(chart.time ? {values: (u, at) => at.map((t) => hour(t, chart.zone, u.scales.x.max - u.scales.x.min < 600)), space: 66} : {incrs: WHOLE})}, {...axis("", 48), values: (u, values) => values.map(short)}],
    series: [{label: chart.x, value: chart.time ? (u, v) => v == null ? "–" : hour(v, chart.zone, true) : (u, v) => v == null ? "–" : String(v)},
      ...chart.series.map((name, i) => ({
        label: name, value: (u, v) => short(v), width: 1.6, spanGaps: true, stroke: css("--c" + i % 6),
        points: {show: chart.data[0].length < 60, size: 5, fill: css("--c" + i % 6)},
      }))],
  });
  const draw = (redraw) => {
    for (const [element, {plot}] of drawn) if (!element.isConnected) { plot.destroy(); drawn.delete(element); }
    for (const element of document.querySelectorAll(".chart[data-from]")) {
      const data = document.getElementById(element.dataset.from);
      if (!data) continue;
      const was = drawn.get(element);
      if (was && was.text === data.textContent && !redraw) continue;
      const chart = JSON.parse(data.textContent);
      element.dataset.points = chart.data[0].length;
      if (was && !redraw && was.series === chart.series.join("\n") && chart.data[0].length && (was.plot.data[0].length < 60) === (chart.data[0].length < 60)) {
        was.plot.setData(chart.data);
        was.text = data.textContent;
        continue;
      }
      if (was) was.plot.destroy();
      element.textContent = "";
      if (!chart.data[0].length) { drawn.delete(element); continue; }
      const plot = new uPlot(options(chart, element), chart.data, element);
      drawn.set(element, {plot, text: data.textContent, series: chart.series.join("\n")});
    }
  };
  let timer = 0;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => {
    for (const [element, {plot}] of drawn) plot.setSize({width: element.clientWidth, height: Number(element.dataset.height || 170)});
  }, 100); });
  document.addEventListener("themechange", () => draw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
  document.addEventListener("htmx:afterSettle", () => draw(false));
  draw(false);
})();

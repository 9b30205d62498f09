// What every page is built of. `data` is what Python handed over.
const data = JSON.parse(document.getElementById("data").textContent);
const drawn = ["svg", "rect", "text", "title", "path", "line", "circle", "g"];
function element(tag, attributes = {}, ...children) {
  const node = drawn.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const append = (...nodes) => document.getElementById("page").append(...nodes);
const section = (title, ...nodes) => { const made = element("section", {}, element("h2", {}, title), ...nodes); append(made); return made; };
const paragraph = text => element("p", { class: "dim" }, text);
const count = value => Math.round(value).toLocaleString("en");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const milliseconds = seconds => `${(1e3 * seconds).toFixed(1e3 * seconds < 10 ? 3 : 1)} ms`;
const duration = seconds => seconds < 120 ? `${seconds.toFixed(1)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
const mebibytes = bytes => bytes < 2 ** 20 / 20 ? "< 0.05" : (bytes / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 });
function size(bytes) {
  for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20]]) if (bytes >= one) return `${(bytes / one).toFixed(2)} ${unit}`;
  return `${(bytes / 2 ** 10).toFixed(2)} KiB`;
}
const words = name => name.replaceAll("_", " ");
const rankColor = rank => rank === null ? "#b9c2cf" : `hsl(${(212 + rank * 137.508) % 360} 58% ${64 + (rank % 3) * 5}%)`;
const phaseColors = { ids: "#4c78a8", lookup: "#54a24b", output: "#e45756", gradient: "#f58518", row_stats: "#9d755d", replicas: "#b279a2", data_parallel: "#72b7b2", update: "#eeca3b", dense: "#a9b2c0" };
function header(title, about, badge) {
  document.title = [title, ...about.slice(0, 1)].join(" · ");
  const line = element("p", { class: "dim" }, about.filter(Boolean).join("  ·  "), " ");
  if (badge) line.append(element("span", { class: `badge ${badge}` }, badge));
  append(element("h1", {}, title), line);
}
function facts(found) {
  append(element("div", { class: "facts" }, ...found.map(([value, label, kind = ""]) => element("div", { class: "fact" }, element("b", { class: kind }, value), element("span", {}, label)))));
}
const note = (text, kind = "") => element("div", { class: `note ${kind}` }, text);
function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([label, color]) => element("span", {}, color === "tick" ? element("i", { class: "tick" }) : element("i", { style: `background:${color}` }), label)));
}
// A bar of parts, [share of the width, color, title] each, and a tick at a share where one is given.
function bar(parts, tick) {
  const track = element("div", { class: "track" }, ...parts.map(([share, color, title = ""]) => element("i", { style: `width:${100 * Math.min(1, share)}%;background:${color}`, title })));
  if (tick !== undefined) track.append(element("b", { style: `left:calc(${100 * Math.min(1, tick)}% - 2px)` }));
  return track;
}
// Rows of [label, bar, number].
function bars(rows, kind = "") {
  const made = element("div", { class: `bars ${kind}` });
  for (const [label, track, number] of rows) made.append(element("span", {}, label), track, element("span", { class: "number" }, number));
  return made;
}
function plainTable(head, rows) {
  const isNumber = head.map((_, i) => i > 0 && rows.every(row => /^[-+\d.,\s%e]*$/.test(row[i])));
  const cells = (tag, values) => element("tr", {}, ...values.map((value, i) => element(tag, isNumber[i] ? { class: "n" } : {}, value)));
  return element("div", { class: "scroll" }, element("table", { style: "width:auto" }, element("thead", {}, cells("th", head)), element("tbody", {}, ...rows.map(row => cells("td", row)))));
}
// The rectangles of a table: rows down, columns across.
function map(table, width, height, kind = "") {
  const picture = element("svg", { class: `map ${kind}`.trim(), viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `rectangles of ${table.name}` });
  for (const [row, column, rows, columns, rank] of table.rectangles) {
    const x = width * column / table.embedding_dim, w = width * columns / table.embedding_dim;
    const y = height * row / table.num_embeddings, h = height * rows / table.num_embeddings;
    picture.append(element("rect", { x, y, width: w, height: h, fill: rankColor(rank), stroke: "#0005" }, element("title", {}, `rank ${rank}: rows ${row} to ${row + rows - 1}, columns ${column} to ${column + columns - 1}`)));
    if (w > 44 && h > 13) picture.append(element("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle" }, `rank ${rank}`));
  }
  return picture;
}
function owners(table) {
  if (!table.rectangles.length) return "all";
  const found = [...new Set(table.rectangles.map(r => r[4]))].sort((a, b) => a - b);
  return found.length > 12 ? `${found.slice(0, 12).join(", ")} and ${found.length - 12} more` : found.join(", ");
}
// The tables of a plan: searched, sorted by a click on a column, with a map where a table is split. `detail`
// makes what a click on a row opens.
function tableList(tables, detail) {
  const search = element("input", { type: "search", placeholder: "search: table, sharding type, or rank 3", "aria-label": "search tables" });
  const shown = element("span", { class: "dim", id: "count" });
  const columns = [["table", t => t.name], ["sharding type", t => t.sharding_type], ["rows", t => t.num_embeddings], ["columns", t => t.embedding_dim], ["MiB", t => t.num_bytes], ["ranks", t => t.rectangles.length ? t.rectangles[0][4] : -1]];
  let by = 4, down = true;
  const head = element("tr"), body = element("tbody", { id: "tables" });
  columns.forEach(([name], i) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => { down = by === i ? !down : i > 1 && i < 5; by = i; show(); });
    head.append(element("th", i > 1 && i < 5 ? { class: "n" } : {}, button));
  });
  head.append(element("th", {}, "where it is split"));
  function rowOf(table) {
    const number = value => element("td", { class: "n" }, value);
    const split = table.rectangles.length > 1 ? map(table, 170, 30, "small") : "";
    const row = element("tr", detail ? { class: "table" } : {}, element("td", {}, table.name), element("td", {}, table.sharding_type.replaceAll("_", "-")), number(table.num_embeddings.toLocaleString("en")), number(String(table.embedding_dim)), number(mebibytes(table.num_bytes)), element("td", {}, owners(table)), element("td", {}, split));
    if (detail) row.addEventListener("click", () => {
      const next = row.nextSibling;
      if (next && next.dataset.detail) next.remove();
      else row.after(element("tr", { "data-detail": "1" }, element("td", { colspan: "7" }, element("div", { class: "detail" }, ...detail(table)))));
    });
    return row;
  }
  function show() {
    const wanted = search.value.trim().toLowerCase(), rank = /^rank\s*(\d+)$/.exec(wanted), key = columns[by][1];
    const found = tables.filter(t => !wanted || (rank ? t.rectangles.some(r => r[4] === Number(rank[1])) : t.name.toLowerCase().includes(wanted) || t.sharding_type.replaceAll("_", "-").includes(wanted.replaceAll("_", "-"))));
    found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1));
    [...head.children].forEach((th, i) => { if (i === by) th.setAttribute("aria-sort", down ? "descending" : "ascending"); else th.removeAttribute("aria-sort"); });
    shown.textContent = ` ${found.length} of ${tables.length}`;
    body.replaceChildren(...found.map(rowOf));
  }
  search.addEventListener("input", show);
  const query = new URLSearchParams(location.hash.slice(1));
  if (query.has("search")) search.value = query.get("search");
  show();
  if (query.has("open")) for (const row of [...body.querySelectorAll("tr.table")].slice(0, Number(query.get("open")))) row.click();
  return [search, shown, element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body))];
}
// Round numbers from `low` to `high`, about `most` of them, and their decimals.
function ticks(low, high, most = 5) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= rough), found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step + 0; value <= high + step * 1e-9; value += step) found.push(value);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}
// Curves over training: `lines` of [step, value] points, where a line with `dots` has a dot for each. In another
// `unit`, points have times instead of steps, on an axis `from` one time `to` another; by default, from 0 to the last point.
// `perEpoch` steps are an epoch, if known, and `bestStep` and `marks` of [step, text] are drawn as vertical lines.
function lineChart(title, lines, { perEpoch = 0, bestStep = 0, marks = [], unit = "step", from = 0, to = null } = {}) {
  if (!lines.length) return null;
  const width = 520, height = 270, left = 56, right = 16, top = 14, bottom = 46, all = lines.flatMap(line => line.points);
  let x0 = from, x1 = to ?? Math.max(...all.map(p => p[0])), y0 = Math.min(...all.map(p => p[1])), y1 = Math.max(...all.map(p => p[1]));
  const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.05 || 1; y0 -= pad; y1 += pad;
  const x = v => left + (width - left - right) * (v - x0) / (x1 - x0 || 1), y = v => height - bottom - (height - top - bottom) * (v - y0) / (y1 - y0);
  const picture = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const [yt, decimals] = ticks(y0, y1);
  for (const v of yt) picture.append(element("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), stroke: "var(--line)" }), element("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, decimals ? v.toFixed(decimals) : v.toLocaleString("en")));
  const below = (v, text, row) => picture.append(element("text", { x: x(v), y: height - bottom + row, "text-anchor": "middle" }, text));
  for (const v of ticks(x0, x1)[0]) if (x(x1) - x(v) > 44) below(v, v.toLocaleString("en"), 17);
  below(x1, x1.toLocaleString("en"), 17);
  const last = perEpoch ? Math.floor(x1 / perEpoch + 1e-6) : 0;
  if (last) for (const epoch of ticks(0, last)[0].filter(e => e >= 1 && Number.isInteger(e))) {
    picture.append(element("line", { x1: x(epoch * perEpoch), x2: x(epoch * perEpoch), y1: height - bottom, y2: height - bottom + 5, stroke: "var(--dim)" }));
    below(epoch * perEpoch, `epoch ${epoch}`, 31);
  }
  picture.append(element("text", { x: left - 8, y: height - bottom + 17, "text-anchor": "end" }, unit));
  if (bestStep && bestStep <= x1) {
    const at = x(bestStep);
    picture.append(element("line", { x1: at, x2: at, y1: top, y2: height - bottom, stroke: "var(--good)", "stroke-dasharray": "4 4" }), element("text", { x: at + (at > width / 2 ? -5 : 5), y: top + 8, "text-anchor": at > width / 2 ? "end" : "start", style: "fill:var(--good)" }, "best step"));
  }
  for (const [step, text] of marks) if (step >= x0 && step <= x1) picture.append(element("line", { x1: x(step), x2: x(step), y1: top, y2: height - bottom, stroke: "var(--dim)", "stroke-dasharray": "2 3" }, element("title", {}, `step ${step}: ${text}`)), element("text", { x: x(step) + 4, y: height - bottom - 6, style: "fill:var(--dim)" }, text));
  for (const line of lines) {
    const path = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    if (!line.dotsOnly) picture.append(element("path", { d: path, fill: "none", stroke: line.color, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (line.dots || line.points.length === 1) for (const p of line.points) picture.append(element("circle", { cx: x(p[0]), cy: y(p[1]), r: line.dotsOnly ? 5 : 3.5, fill: line.color, stroke: "var(--back)", "stroke-width": 1.2 }, element("title", {}, `${line.label}, ${unit} ${p[0]}: ${p[1].toPrecision(5)}`)));
  }
  return element("div", { class: "card" }, element("h3", {}, title), legend(lines.map(line => [line.label, line.color])), picture);
}
// Points in the unit square, one line for each part of the data, over the diagonal.
function square(title, below, left, lines, dots, hasDiagonal = true) {
  const size = 300, at = 50, x = v => at + (size - at - 10) * v, y = v => size - at - (size - at - 10) * v;
  const picture = element("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": title, style: "max-width:420px" });
  for (const v of [0, 0.25, 0.5, 0.75, 1]) picture.append(element("line", { x1: x(0), x2: x(1), y1: y(v), y2: y(v), stroke: "var(--line)" }), element("text", { x: at - 6, y: y(v) + 4, "text-anchor": "end" }, String(v)), element("text", { x: x(v), y: size - at + 15, "text-anchor": "middle" }, String(v)));
  if (hasDiagonal) picture.append(element("line", { x1: x(0), x2: x(1), y1: y(0), y2: y(1), stroke: "var(--dim)", "stroke-dasharray": "4 4" }));
  picture.append(element("text", { x: x(0.5), y: size - 8, "text-anchor": "middle" }, below), element("text", { x: -y(0.5), y: 9, transform: "rotate(-90)", "text-anchor": "middle" }, left));
  for (const line of lines) {
    picture.append(element("path", { d: line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join(""), fill: "none", stroke: line.color, "stroke-width": 2 }));
    if (dots) for (const p of line.points) picture.append(element("circle", { cx: x(p[0]), cy: y(p[1]), r: 3.5, fill: line.color }, element("title", {}, `${line.label}: predicted ${p[0].toFixed(4)}, measured ${p[1].toFixed(4)}, ${count(p[2])} samples`)));
  }
  return element("div", { class: "card" }, element("h3", {}, title), legend(lines.map(line => [line.label, line.color])), picture);
}
// The points of a metric over the steps of a run, or over its `seconds`, from its lines of one kind: train, validation or test.
const points = (metrics, kind, field, over = "step") => metrics.filter(m => m.kind === kind && [m[field], m[over]].every(value => value !== undefined && value !== null)).map(m => [Math.round(10 * m[over]) / 10, m[field]]);
const stepsPerEpoch = metrics => Math.max(0, ...metrics.filter(m => m.epoch > 0).map(m => m.step / m.epoch));
// Ranking and calibration of [label, color, curves], where `curves` is what `meshrec.metrics.binary_curves` returns.
function curveCharts(found) {
  const linesOf = name => found.map(([label, color, curves]) => ({ label, color, points: curves[name] || [] })).filter(line => line.points.length);
  const charts = [
    ["Receiver operating curve", "false positive rate", "true positive rate", linesOf("roc")],
    ["Precision and recall", "recall", "precision", linesOf("precision_recall"), false, false],
    ["Gains", "share of all samples, best scores first", "share of positive samples", linesOf("gains")],
    ["Calibration", "mean prediction", "share of positive samples", linesOf("calibration"), true],
  ].filter(([, , , lines]) => lines.length).map(each => square(...each));
  return [element("div", { class: "charts" }, ...charts), paragraph("The reported weights. A perfect ranking goes through the upper left corner of the operating curve and the upper right corner of precision and recall. The lift is the height of the gains over the share of samples: 1 on the diagonal. Perfect probabilities lie on the diagonal.")];
}

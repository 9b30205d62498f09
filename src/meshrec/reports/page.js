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

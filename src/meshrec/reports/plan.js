const phases = Object.keys(data.phases).filter(name => data.phases[name] > 0);
const replicas = data.replicas > 1 ? `, ${data.replicas} replicas` : "";
header("Sharding plan", [`${plural(data.tables.length, "table")} on ${plural(data.world_size, "rank")}`, `${data.hardware}${replicas}`, `${plural(data.batch_size, "sample")} per rank`]);
facts([
  [milliseconds(data.seconds), "a step without its dense part"], [milliseconds(data.lower_bound), "no plan is faster than"],
  [`${(100 * data.gap).toFixed(2)} %`, "proven gap"], [count(data.replicated.length), "data-parallel tables"],
  ...phases.map(name => [milliseconds(data.phases[name]), words(name)]),
]);
append(element("p", { class: "dim" }, "Predicted by the planner's model of the hardware, and proven of that model; the report of a run puts what was measured beside it."));
append(...data.warnings.map(text => note(text)));
const total = rank => phases.reduce((sum, name) => sum + rank.phases[name], 0);
const longest = Math.max(...data.ranks.map(total)) || 1;
section("Load per rank", paragraph("The time of what a rank does itself, without latencies, which all ranks share."), legend(phases.map(name => [words(name), phaseColors[name]])),
  bars(data.ranks.map(rank => [`rank ${rank.rank}`, bar(phases.map(name => [rank.phases[name] / longest, phaseColors[name], `${words(name)}: ${milliseconds(rank.phases[name])}`])), milliseconds(total(rank))]), "tall"));
section("Memory per rank", paragraph(`Of ${size(data.memory_cap)} that a rank may use.`),
  bars(data.ranks.map(rank => { const part = rank.num_bytes / data.memory_cap; return [`rank ${rank.rank}`, bar([[part, part > 0.95 ? "var(--bad)" : rankColor(rank.rank), rank.tables.join(", ")]]), `${size(rank.num_bytes)} (${(100 * part).toFixed(0)} %)`]; }), "tall"));
function detail(table) {
  const where = table.rectangles.length ? [map(table, 380, 190)] : [];
  const about = element("div", {}, ...where, element("div", { class: "dim" }, `${table.num_embeddings.toLocaleString("en")} rows (down) x ${table.embedding_dim} columns (across)`));
  if (!table.alternatives.length) return [about, element("div", {}, "Alternatives are listed for the largest tables only.")];
  const rows = table.alternatives.map(other => {
    const change = Math.abs(other.change) < 5e-8 ? "0" : (other.change > 0 ? "+" : "") + (other.change * 1e3).toFixed(4);
    const kind = other.change > 1e-9 ? "worse" : other.change < -1e-9 ? "good" : "";
    return [other.sharding_type.replaceAll("_", "-") + (other.sharding_type === table.sharding_type ? " (chosen)" : ""), other.sharding_type === "data_parallel" ? "all" : String(other.num_parts), element("span", { class: kind }, change)];
  });
  return [about, plainTable(["moving only this table to", "ranks", "step [ms]"], rows)];
}
section("Tables", ...tableList(data.tables, detail), paragraph("A click on a table shows where its parts are, and what other choices would cost."));
const shown = value => value === null || value === undefined ? "" : Array.isArray(value) ? value.map(shown).join(", ") : typeof value === "object" ? Object.entries(value).filter(([, each]) => each !== null && String(each) !== "").map(([name, each]) => `${words(name)} ${shown(each)}`).join(", ") : typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 }) : String(value);
const pairs = values => plainTable(["", "value"], Object.entries(values).map(([name, value]) => [words(name), shown(value)]));
const { hardware, ...topology } = data.inputs.topology, fields = [...new Set(data.inputs.tables.flatMap(table => Object.keys(table)))].filter(name => data.inputs.tables.some(table => shown(table[name]) !== ""));
const limits = Object.entries(data.inputs.constraints);
section("What the planner reckoned with", paragraph("Times follow from these figures alone: from the speeds of the hardware, the latencies of exchanges, and how many IDs each table is asked for. Measure your machine with meshrec calibrate."),
  element("details", {}, element("summary", {}, "Hardware and topology"), pairs({ "samples per rank": data.inputs.batch_size, ...topology }), pairs(hardware)),
  element("details", {}, element("summary", {}, "Tables, as the cost model sees them"), element("div", { class: "scroll" }, plainTable(fields.map(words), data.inputs.tables.map(table => fields.map(name => shown(table[name])))))),
  ...(limits.length ? [element("details", {}, element("summary", {}, "Constraints"), plainTable(["table", "constraint"], limits.map(([name, value]) => [name, shown(value)])))] : []));

const roles = {};
for (const column of data.columns) roles[column.role] = (roles[column.role] || 0) + 1;
header("What is in the data", [data.data.join(", "), plural(data.rows, "row"), plural(data.columns.length, "column")]);
facts([[data.label, "the label"], [data.time ?? "none", "orders the rows"], ...Object.entries(roles).filter(([role]) => !["label", "time"].includes(role)).map(([role, number]) => [count(number), `become ${role}`])]);
append(...data.warnings.map(text => note(text)));
const share = value => value === 0 ? "" : `${(100 * value).toFixed(1)} %`;
const number = value => value === null ? "" : Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6, useGrouping: false });
// Times that are numbers, as the column that orders the rows may hold them, in seconds, milli-, micro- or nanoseconds.
function when(column, value) {
  if (value === null || column.role !== "time") return number(value);
  const unit = [1, 1e3, 1e6, 1e9].find(each => value / each >= 3e8 && value / each <= 4e9);
  return unit === undefined ? number(value) : new Date(1e3 * value / unit).toISOString().slice(0, 19).replace("T", " ");
}
section("Columns", paragraph("What each becomes in the recipe, and why. Signal is the AUC of the column alone, on held-out rows of a sample."),
  plainTable(["column", "becomes", "because", "type", "missing", "distinct", "from", "to", "signal", "table's rows", "examples"],
    data.columns.map(column => [column.name, column.role, column.reason, column.type, share(column.missing), count(column.distinct), when(column, column.low), when(column, column.high),
      column.signal === null ? "" : column.signal.toFixed(3), column.rows ? count(column.rows) : "", column.examples.map(each => column.role === "time" && /^\d+$/.test(each) ? when(column, Number(each)) : each).join(" · ")])));
const skewed = data.columns.filter(column => ["id", "list"].includes(column.role) && column.top.length);
if (skewed.length) section("The most frequent values", paragraph("Shares of the twenty most frequent values of each column of ids."),
  bars(skewed.map(column => [column.name, bar(column.top.map((part, i) => [part, rankColor(i), `${(100 * part).toFixed(2)} %`])), `${(100 * column.top.reduce((sum, part) => sum + part, 0)).toFixed(0)} %`]), "tall"));

const roles = {};
for (const column of data.columns) roles[column.role] = (roles[column.role] || 0) + 1;
header("What is in the data", [data.data.join(", "), plural(data.rows, "row"), plural(data.columns.length, "column")]);
facts([[data.label, "the label"], [data.time ?? "none", "orders the rows"], ...Object.entries(roles).filter(([role]) => !["label", "time"].includes(role)).map(([role, number]) => [count(number), `become ${role}`])]);
append(...data.warnings.map(text => note(text)));
const share = value => value === 0 ? "" : `${(100 * value).toFixed(1)} %`;
const number = value => value === null ? "" : Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6, useGrouping: false });
section("Columns", paragraph("What each becomes in the recipe, and why. Signal is the AUC of the column alone, on held-out rows of a sample."),
  plainTable(["column", "becomes", "because", "type", "missing", "distinct", "from", "to", "signal", "table's rows", "examples"],
    data.columns.map(column => [column.name, column.role, column.reason, column.type, share(column.missing), count(column.distinct), number(column.low), number(column.high),
      column.signal === null ? "" : column.signal.toFixed(3), column.rows ? count(column.rows) : "", column.examples.join(" · ")])));
const skewed = data.columns.filter(column => ["id", "list"].includes(column.role) && column.top.length);
if (skewed.length) section("The most frequent values", paragraph("Shares of the twenty most frequent values of each column of ids."),
  bars(skewed.map(column => [column.name, bar(column.top.map((part, i) => [part, rankColor(i), `${(100 * part).toFixed(2)} %`])), `${(100 * column.top.reduce((sum, part) => sum + part, 0)).toFixed(0)} %`]), "tall"));

const runs = data.runs.map((run, i) => ({ ...run, color: ["var(--ours)", "var(--second)", "var(--third)"][i] || `hsl(${(40 + i * 137.508) % 360} 55% 50%)` }));
header(`${runs.map(run => run.name).join(", ")}`, [`${plural(runs.length, "run")}, compared with the first`]);
for (const text of data.warnings) append(note(text, "failed"));
for (const [title, head, rows] of data.tables) section(title, plainTable(head, rows));

// One chart for each metric and part of the data, with a line for each run.
function charts(curves, over, unit) {
  const linesOf = (kind, field) => runs.map(run => ({ label: run.name, color: run.color, dots: kind !== "train", points: points(run.metrics, kind, field, over) })).filter(line => line.points.length);
  return curves.map(([title, kind, field]) => lineChart(title, linesOf(kind, field), { unit })).filter(Boolean);
}
const bySteps = charts(data.curves, "step", "step");
if (bySteps.length) section("Curves", element("div", { class: "charts" }, ...bySteps));
// Runs may need different times per step.
const bySeconds = charts(data.curves.filter(([, kind]) => kind === "validation"), "seconds", "seconds");
if (bySeconds.length) section("Curves over training time", element("div", { class: "charts" }, ...bySeconds));
for (const kind of ["test", "validation"]) {
  const found = runs.filter(run => run.curves[kind] && run.curves[kind].roc.length).map(run => [run.name, run.color, run.curves[kind]]);
  if (found.length) section(`Ranking and calibration, ${kind} data`, ...curveCharts(found));
}

// A run on a stream. `run` is what the run's own server answered last, and `span` the minutes that the charts show.
let run = data, span = 0, isAway = false;
const titleOf = name => { const [metric, window] = name.split("@"); return `${run.titles[metric] || words(metric)}${window ? `, last ${window}` : ""}`; };
const isNumber = value => typeof value === "number";
const age = time => isNumber(time) ? duration(Math.max(0, run.now - time)) : "–";
const value = (line, name) => line && isNumber(line[name]) ? line[name].toFixed(4) : "–";

// A chart over the minutes before now, of [label, color, kind, field].
function timeChart(title, curves, marks = []) {
  const first = span ? run.now - 60 * span : -Infinity, times = run.lines.map(line => line.time).filter(time => time >= first);
  const unit = (run.now - Math.min(...times)) > 3 * 3600 ? ["h", 3600] : ["min", 60], x = time => (time - run.now) / unit[1];
  const lines = curves.map(([label, color, kind, field]) => ({ label, color, points: run.lines.filter(line => line.kind === kind && line.time >= first && isNumber(line[field])).map(line => [x(line.time), line[field]]) })).filter(line => line.points.length);
  return lineChart(title, lines, { from: Math.min(...lines.flatMap(line => line.points.map(p => p[0]))), to: 0, unit: unit[0], marks: marks.map(alarm => [x(alarm.time), alarm.on === false ? "ends" : "alarm"]) });
}
const aboutAlarm = alarm => Object.entries(alarm).filter(([name]) => !["kind", "step", "time", "on", "text"].includes(name));
// The alarms that last: of each metric, the newest one says whether.
const lasting = () => Object.values(Object.fromEntries(run.alarms.map(alarm => [(aboutAlarm(alarm)[0] || [""])[0], alarm]))).filter(alarm => alarm.on !== false);
const alarmText = alarm => {
  const about = aboutAlarm(alarm).map(([name, value]) => `${name} ${isNumber(value) ? value.toFixed(3) : value}`);
  return `${new Date(1e3 * alarm.time).toLocaleString()}, step ${count(alarm.step)}: ${alarm.text || about.join(", ")}${alarm.on === false ? " (ended)" : ""}`;
};
function served() {
  if (!run.served) return [];
  if (run.served.error) return [["–", `served: no answer (${run.served.error})`, "worse"]];
  return [[age(run.served.event_time), `age of the newest event that the server knows, delta ${run.served.delta ?? "none"}`, run.served.reason ? "worse" : ""]];
}
function draw() {
  document.getElementById("page").replaceChildren();
  const train = run.last.train, delta = run.last.delta, saved = run.checkpoint;
  header(run.name, [run.recipe ? `recipe ${run.recipe}` : "loading", run.stream, run.ranks && `${plural(run.ranks, "rank")} on ${run.device}`, run.began && `began ${run.began.slice(0, 16).replace("T", " ")}`], run.state.name);
  if (isAway) append(note(`No answer since ${new Date(1e3 * run.now).toLocaleTimeString()}: the run has ended, or this machine does not reach it.`, "failed"));
  if (run.state.error) append(note(run.state.error, "failed"));
  for (const alarm of lasting()) append(note(`Alarm since ${alarmText(alarm)}`, "failed"));
  if (run.hold !== null) append(note(run.hold, "failed"));
  if (run.served && run.served.reason) append(note(`The server takes no more deltas: ${run.served.reason}`, "failed"));
  const cards = ["auc", "normalized_entropy", "calibration"].map(name => `${name}@hour`).filter(name => train && isNumber(train[name])).map(name => [value(train, name), titleOf(name)]);
  if (train) cards.push([value(train, "loss"), `${run.titles.loss} since the line before`], [count(train.samples_per_second), "samples per second"], [age(train.event_time), "lag: age of the newest event"]);
  if (delta) cards.push([duration(Math.max(0, delta.freshness)), `from event to delta ${delta.delta}, ${age(delta.time)} ago`]);
  cards.push(...served());
  if (train) cards.push([count(train.step), `steps, the last line ${age(train.time)} ago`]);
  cards.push(saved ? [age(saved.time), `since the checkpoint of step ${count(saved.step)}`] : ["–", "no checkpoint yet"]);
  facts(cards);
  if (!train) append(note("No metrics yet: the first line comes after the first steps."));
  const metrics = ["auc", "loss", "normalized_entropy", "calibration", "samples"].filter(name => train && isNumber(train[`${name}@hour`]));
  if (metrics.length) section("Test, then train", plainTable(["metric", "last line", "last hour", "last day"], metrics.map(name => [words(run.titles[name] || name), ...(name === "samples" ? ["", count(train["samples@hour"]), count(train["samples@day"])] : [name, `${name}@hour`, `${name}@day`].map(field => value(train, field)))])),
    paragraph("Predictions are judged before the model learns from the same events. Windows are in event time. An entropy below 1 is better than the mean label of the window before."));
  const windows = name => [["last hour", "var(--ours)", "train", `${name}@hour`], ["last day", "var(--second)", "train", `${name}@day`]];
  const buttons = element("div", { class: "legend" }, ...[["all", 0], ["24 h", 1440], ["6 h", 360], ["1 h", 60]].map(([label, minutes]) => {
    const button = element("button", { type: "button", "aria-pressed": String(span === minutes) }, label);
    button.addEventListener("click", () => { span = minutes; draw(); });
    return button;
  }));
  const charts = [
    timeChart(titleOf("auc"), windows("auc")), timeChart(titleOf("normalized_entropy"), windows("normalized_entropy")), timeChart(titleOf("calibration"), windows("calibration"), run.alarms),
    timeChart(titleOf("loss"), [["since the line before", "var(--ours)", "train", "loss"]]),
    timeChart("samples per second", [["training", "var(--ours)", "train", "samples_per_second"]]),
    timeChart("seconds behind", [["lag: age of the newest event", "var(--ours)", "train", "lag"], ["freshness: from event to delta", "var(--second)", "delta", "freshness"]]),
  ].filter(Boolean);
  if (charts.length) section("Curves", buttons, element("div", { class: "charts" }, ...charts));
  if (run.alarms.length) section("Alarms", ...run.alarms.toReversed().map(alarm => note(alarmText(alarm))));
}
async function update() {
  try {
    const answer = await fetch("data");
    if (!answer.ok) throw new Error(answer.statusText);
    run = await answer.json();
    isAway = false;
  } catch { isAway = true; }
  // A selection would be lost.
  if (!String(getSelection())) draw();
  setTimeout(update, 3000);
}
draw();
setTimeout(update, 3000);

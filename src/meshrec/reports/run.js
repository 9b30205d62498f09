const { summary, config, plan } = data, judged = { validation: summary.validation || {}, test: summary.test || {} };
const recipe = config.recipe ? config.recipe.name : "this run", began = (config.began || "").slice(0, 16).replace("T", " ");
header(data.name, [`recipe ${recipe}`, config.ranks && `${plural(config.ranks, "rank")} on ${config.device}`, began && `began ${began}`], data.state.name);
if (data.state.error) append(note(`It failed${data.state.step ? ` after step ${count(data.state.step)}` : ""}: ${data.state.error}`, "failed"));
for (const failure of summary.failed_saves || []) append(note(`No checkpoint was saved: ${failure}`));
const lead = data.leading, leading = data.titles[lead];
const beaten = kind => Object.values(summary[kind === "test" ? "baselines_test" : "baselines"] || {}).every(q => !(q[lead] > judged[kind][lead]));
const cards = [];
for (const kind of ["test", "validation"]) if (judged[kind][lead] !== undefined) {
  const interval = (data.intervals || {})[kind], span = interval ? `, 95 %: ${interval.map(value => value.toFixed(4)).join(" to ")}` : "";
  cards.push([judged[kind][lead].toFixed(4), `${kind} ${leading}${span}`, beaten(kind) ? "good" : ""]);
}
const quality = judged.test.loss === undefined ? ["validation", judged.validation] : ["test", judged.test];
if (quality[1].loss !== undefined) cards.push([quality[1].loss.toFixed(4), `${quality[0]} ${data.titles.loss}`]);
if (quality[1].normalized_entropy !== undefined) cards.push([quality[1].normalized_entropy.toFixed(4), `${quality[0]} ${data.titles.normalized_entropy}`]);
if (summary.best_step) cards.push([count(summary.best_step), summary.weights_step === summary.best_step ? "the best step, whose weights are kept" : "the best step"]);
const steps = summary.step || data.state.step;
if (steps) cards.push([count(steps), summary.num_steps > steps ? `steps of ${count(summary.num_steps)}` : "steps"]);
if (summary.samples_per_second) cards.push([count(summary.samples_per_second), "samples per second, training"]);
if (summary.seconds) cards.push([duration(summary.seconds), `in all, of them ${duration(summary.train_seconds)} training`]);
const skipped = Object.entries(summary.skipped || {}), lost = skipped.flatMap(([, reasons]) => Object.values(reasons)).reduce((a, b) => a + b, 0);
if (skipped.length) cards.push([count(lost), "rows skipped"]);
facts(cards);
if (summary.winner) append(note(summary.winner));
if (summary.ended_because) append(note(summary.ended_because));
if (summary.final) append(note(summary.final.text));
for (const text of summary.remarks || []) append(note(text));

const models = { validation: [], test: [] };
for (const [kind, key] of [["validation", "baselines"], ["test", "baselines_test"]]) for (const [name, q] of Object.entries(summary[key] || {})) if (q[lead] !== undefined) models[kind].push([name, q[lead], "baseline"]);
if (models.validation.length || models.test.length) {
  const low = lead === "auc" ? 0.45 : 0, parts = [];
  for (const kind of ["test", "validation"]) {
    if (judged[kind][lead] === undefined) continue;
    const found = [...models[kind], [recipe, judged[kind][lead], "ours"]];
    if (kind === "validation" && summary.best_possible_auc) found.push(["the best possible", summary.best_possible_auc, "bound"]);
    found.sort((a, b) => a[1] - b[1]);
    const high = Math.max(...found.map(f => f[1])) + 0.005;
    parts.push(element("div", { class: "card" }, element("h3", {}, kind === "test" ? "Test: looked at once, at the end" : "Validation: chose the best step"), bars(found.map(([name, auc, what]) => {
      const wins = what === "baseline" && auc > judged[kind][lead];
      const strong = text => what === "ours" ? element("b", {}, text) : text;
      return [strong(wins ? `${name} (better)` : name), bar([[Math.max(0, auc - low) / (high - low), what === "ours" ? "var(--ours)" : wins ? "var(--second)" : "#9aa6b8"]]), strong(auc.toFixed(4))];
    }))));
  }
  section(`${leading} against the baselines`, element("div", { class: "charts" }, ...parts), paragraph(lead === "auc" ? `Bars start at ${low}; a guess has 0.5.` : "Bars start at 0."));
}

function chart(title, field) {
  const kinds = [["training", "train", "var(--ours)"], ["validation", "validation", "var(--second)"], ["test", "test", "var(--third)"]];
  const lines = kinds.map(([label, kind, color]) => ({ label, color, dots: kind !== "train", dotsOnly: kind === "test", points: points(data.metrics, kind, field) })).filter(line => line.points.length);
  return lineChart(title, lines, { perEpoch: stepsPerEpoch(data.metrics), bestStep: summary.best_step, marks: worlds });
}
const starts = config.starts || [];
const worlds = starts.flatMap((s, i) => i && s.ranks !== starts[i - 1].ranks ? [[s.from_step || 0, `${s.ranks} ranks, ${starts[i - 1].ranks} before`]] : []); // where the curves mark a change
if (starts.length > 1 || Object.keys((starts[0] || {}).hosts || {}).length > 1) {
  const named = hosts => Object.entries(hosts || {}).map(([host, ranks]) => `${host}: ${ranks}`).join(", ");
  section("Where it ran", paragraph("A line for each start of the ranks, and the checkpoint that they continued from. The curves mark where the number of ranks changed."),
    plainTable(["began", "from step", "ranks", "ranks of each host", "changed options"], starts.map((s, i) => [(s.began || "").slice(0, 19).replace("T", " "), count(s.from_step || 0), `${s.ranks}${i && starts[i - 1].ranks !== s.ranks ? ` (${starts[i - 1].ranks} before)` : ""}`, named(s.hosts), (s.changes || []).map(c => c[0]).join(", ")])));
}
if ((data.stragglers || []).length) section("Who was waited for", paragraph("The share of the other ranks' time in training that they stood still for a rank."),
  bars(data.stragglers.map(s => [`rank ${s.rank}`, bar([[s.share, "var(--ours)"]]), `${(100 * s.share).toFixed(1)} %`])));
const charts = [[data.titles.loss, "loss"], [leading, lead], ["samples per second", "samples_per_second"], [data.titles.normalized_entropy, "normalized_entropy"], ["learning rate of the dense part", "lr"], ["learning rate of the tables", "table_lr"], ["gradient norm of the dense part", "dense_gradient_norm"], ["peak memory of all ranks, MiB", "peak_memory_mib"], ["CPU seconds of all ranks", "cpu_seconds"]].map(pair => chart(...pair)).filter(Boolean);
if (charts.length) section("Curves", element("div", { class: "charts" }, ...charts));
// By table: how many IDs live, and how many came, were refused and went since the point before.
const said = { live: "IDs that live", new: "new IDs", refused: "refused IDs", evicted: "evicted IDs", hit_rate: "share of the IDs read that had a row" };
const hashed = [...new Set(data.metrics.flatMap(m => Object.keys(m).filter(name => name.startsWith("hashed/")).map(name => name.slice(7, name.lastIndexOf("/")))))];
for (const table of hashed) {
  const found = Object.entries(said).map(([what, title]) => chart(`${table}: ${title}`, `hashed/${table}/${what}`)).filter(Boolean);
  section(`IDs of table ${table}`, element("div", { class: "charts" }, ...found), paragraph("New, refused and evicted IDs are those since the point before."));
}

const curves = Object.entries(summary.curves || {}).filter(([, c]) => c.roc.length).map(([label, c]) => [label, label === "test" ? "var(--third)" : "var(--second)", c]);
// Baselines have the curves of the data that the run was judged on last; their calibration would hide the run's.
const others = Object.entries(summary.baseline_curves || {}).map(([name, c], i) => [name, `hsl(215 10% ${50 + 12 * i}%)`, { ...c, calibration: [] }]);
if (curves.length) section("Ranking and calibration", ...curveCharts([...others, ...curves]));

const explained = summary.explained;
if (explained) {
  const found = Object.entries(explained.importance), most = Math.max(...found.map(([, lost]) => lost), 1e-9);
  section("What the model reads", paragraph(`${explained.metric === "loss" ? "How much the loss grows" : `The ${data.titles[explained.metric]} that is lost`} when the values of one feature are shuffled among ${count(explained.samples)} validation samples. Features that say the same stand in for each other.`),
    bars(found.map(([name, lost]) => [name, bar([[Math.max(0, lost) / most, "var(--ours)"]]), lost.toFixed(4)]), "tall"));
  for (const [feature, values] of Object.entries(explained.slices)) {
    const figure = value => value === undefined ? "" : value.toFixed(4);
    append(element("h3", {}, `By ${feature}`), plainTable(["value", "samples", "AUC", "log loss", "calibration"], Object.entries(values).map(([value, q]) => [value, count(q.samples), figure(q.auc), figure(q.loss), figure(q.calibration)])));
  }
}

const whole = (summary.phases || []).find(row => row.phase === "step");
if (plan) {
  const said = `Proven, of the planner's model of the hardware (${plan.hardware}): no plan is faster than ${milliseconds(plan.lower_bound)} per step for the tables; this one takes ${milliseconds(plan.seconds)}, a gap of ${(100 * plan.gap).toFixed(1)} %.`;
  const met = whole && whole.predicted ? ` Measured in this run: ${milliseconds(whole.measured)}, ${(whole.measured / whole.predicted).toFixed(1)} times what the model says.` : " This run measured no phase, so how far the model is from it is not known.";
  const rows = summary.phases || [], longest = Math.max(...rows.map(row => Math.max(row.predicted, row.measured)));
  section("Predicted and measured", element("p", {}, said + met), ...(rows.length ? [
    legend([["measured, slowest rank", "#9aa6b8"], ["predicted", "tick"]]),
    bars(rows.map(row => [words(row.phase), bar([[row.measured / longest, row.phase === "step" ? "var(--ours)" : phaseColors[row.phase]]], row.predicted / longest), `${milliseconds(row.measured)} / ${milliseconds(row.predicted)}`])),
  ] : []));
}
if (data.phases.length) {
  const names = [...new Set(data.phases.flatMap(r => Object.keys(r.phases)))], total = r => Object.values(r.phases).reduce((a, b) => a + b, 0);
  const longest = Math.max(...data.phases.map(total)) || 1;
  section("Time per phase and rank", paragraph("One training step: the median over the recorded ones. The dense part is all that is no table."), legend(names.map(name => [words(name), phaseColors[name]])),
    bars(data.phases.map(r => [`rank ${r.rank}`, bar(names.filter(name => r.phases[name]).map(name => [r.phases[name] / longest, phaseColors[name], `${words(name)}: ${milliseconds(r.phases[name])}`])), milliseconds(total(r))]), "tall"), element("br"),
    plainTable(["phase [ms]", ...data.phases.map(r => `rank ${r.rank}`)], names.map(name => [words(name), ...data.phases.map(r => r.phases[name] ? (1e3 * r.phases[name]).toFixed(2) : "")])),
    ...(data.phases.some(r => r.hidden) ? [paragraph("What exchanges hide behind other work, beside the times above: they take that much more when every one is waited for where it starts."),
      plainTable(["hidden [ms]", ...data.phases.map(r => `rank ${r.rank}`)], names.filter(name => data.phases.some(r => r.hidden && name in r.hidden)).map(name => [words(name), ...data.phases.map(r => r.hidden && name in r.hidden ? (1e3 * r.hidden[name]).toFixed(2) : "")]))] : []));
}
if (plan) {
  const most = Math.max(...plan.ranks.map(r => r.num_bytes)) || 1;
  section("The plan", bars(plan.ranks.map(rank => [`rank ${rank.rank}`, bar([[rank.num_bytes / most, rankColor(rank.rank)]]), size(rank.num_bytes)]), "tall"), element("br"), ...tableList(plan.tables), element("p", { class: "dim" }, "More in ", element("a", { href: "plan.html" }, "plan.html"), ": load, and what other choices for a table would cost."));
}
const lies = [], places = summary.checkpoints || {}, commands = config.commands || {};
const line = (label, text) => { if (text) lies.push(element("dt", { class: "dim" }, label), element("dd", {}, element("code", {}, text))); };
line("the reported weights", places.weights);
line("the last step", places.last);
if (data.has_checkpoint) line("go on training", commands.resume);
if (places.weights) { line("export the weights", commands.export); line("load them in Python", commands.load); }
if (places.weights) for (const [label, name] of [["evaluate on other data", "evaluate"], config.recipe.loss.type === "NextItem" ? ["recommend items", "recommend"] : ["score data", "predict"], ["make a package", "package"], ["serve it", "serve"]]) line(label, commands[name]);
if (lies.length) section("Where things lie, and what to type next", element("dl", {}, ...lies));
if (skipped.length) section("Rows that were skipped", plainTable(["file", "reason", "rows"], skipped.flatMap(([file, reasons]) => Object.entries(reasons).map(([reason, rows]) => [file, reason, count(rows)]))));
append(element("details", {}, element("summary", {}, "All options of the recipe"), element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, ...data.options.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value === null ? "–" : JSON.stringify(value)))))))));

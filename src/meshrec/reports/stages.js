header("Stages", [`${plural(data.stages.length, "stage")}`, `${plural(data.num_splits, "split")} of a batch`]);
const cards = [[milliseconds(data.seconds), "the last batch, forward and backward, measured"]];
if (data.predicted) {
  const best = data.predicted.find(([splits]) => splits === data.num_splits);
  if (best) cards.push([milliseconds(best[1]), "predicted"]);
  cards.push([milliseconds(data.bound), "no cut is faster than"], [`${(100 * data.gap).toFixed(1)} %`, "gap of the cut"]);
}
facts(cards);
const picture = element("div", { class: "scroll" });
picture.innerHTML = data.timeline;
section("Who computed what when", paragraph("A row for each stage, time to the right, the number of each split; grey is waiting."), picture);
section("How busy each stage was", bars(data.stages.map((name, stage) => [name, bar([[data.busy[stage] || 0, rankColor(stage)]]), `${(100 * (data.busy[stage] || 0)).toFixed(0)} %`])));
if (data.predicted) {
  const longest = Math.max(...data.predicted.map(([, seconds]) => seconds));
  section("The predicted step by number of splits", paragraph("Measured were the parts of the model and the link, at several sizes of a split; the step of the best cut follows from them."),
    bars(data.predicted.map(([splits, seconds]) => [plural(splits, "split"), bar([[seconds / longest, splits === data.num_splits ? "var(--ours)" : "#9aa6b8"]]), milliseconds(seconds)])));
}

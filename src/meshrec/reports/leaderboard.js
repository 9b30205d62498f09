const best = data.models[0], low = Math.min(0.5, ...data.models.map(each => each.interval[0])), high = Math.max(...data.models.map(each => each.interval[1]));
header("Leaderboard", [data.data.join(", "), plural(data.rows, "row"), `label ${data.label}`]);
facts([[best.model, "is best on test data"], [best.test.toFixed(4), "its test AUC"], [best.interval.map(value => value.toFixed(4)).join(" to "), "95 % of such test sets"]]);
section("Test AUC", paragraph("All models learned from the same rows, and chose on the same validation rows. Test rows were read once. Models whose intervals overlap may change places on other data."),
  bars(data.models.map(each => [each.model, bar([[(each.test - low) / (high - low || 1), each.kind === "model" ? "var(--ours)" : "#9aa6b8", `${each.interval[0].toFixed(4)} to ${each.interval[1].toFixed(4)}`]]), each.test.toFixed(4)])));
section("Figures", plainTable(["model", "validation AUC", "test AUC", "95 % from", "to"], data.models.map(each => [each.model, each.validation.toFixed(4), each.test.toFixed(4), each.interval[0].toFixed(4), each.interval[1].toFixed(4)])));

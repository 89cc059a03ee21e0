// Steps: how rewards, lengths and truncation are distributed, over the run and within a step.

function stepsPage() {
  const trained = trainedByStep();
  const byStep = (name) => new Map([...trained].map(([step, indices]) => [step, valuesOf(name, indices)]));
  const cut = [...byStep("truncated")].map(([step, values]) => [step, meanOf(values)]).filter(([, share]) => isNumber(share));
  const charts = trained.size > 1 ? [spreadChart("reward: mean, 10 % to 90 %", byStep("score")), spreadChart("length: mean, 10 % to 90 %", byStep("length")),
    lineChart("share of truncated responses", [{ name: "truncated", points: cut }]), componentsChart(trained)] : [];
  const row = (step) => {
    const indices = trained.get(step) || [];
    const scores = scoresOf(indices);
    const evaluated = run.columns.step.reduce((sum, other, index) => sum + (other === step && run.columns.lane[index] === 1), 0);
    return [link(to(`/step/${step}`), String(step)), String(indices.length), numberText(meanOf(scores)), numberText(spreadOf(scores)),
      numberText(meanOf(indices.map((index) => run.columns.length[index]))), percent(meanOf(indices.map((index) => run.columns.truncated[index]))), String(evaluated)];
  };
  const shown = run.steps.length > 400 ? run.steps.slice(-400) : run.steps;
  return section("Steps", element("div", { class: "charts" }, charts), table(["step", "samples", "mean reward", "spread", "mean length", "truncated", "evaluated"], shown.map(row), "steps"),
    shown.length < run.steps.length ? element("p", { class: "note" }, `the last ${shown.length} of ${run.steps.length} steps; the address ${to("/step/N")} shows another`) : null);
}

function componentsChart(trained) {
  const names = componentNames();
  if (!names.length) return null;
  const rows = [...trained].map(([step, indices]) => [step, names.map((name) => meanOf(valuesOf(name, indices)))]);
  return stackedChart("components of the reward, stacked", names.map((name) => name.slice(7)), rows);
}

function stepPage(step) {
  const indices = indicesWhere((index) => run.columns.step[index] === step && run.columns.lane[index] === 0);
  const column = (name) => valuesOf(name, indices);
  const parts = componentNames();
  const groups = run.groups.map((group, number) => number).filter((number) => run.groups[number].step === step);
  return element("div", {}, element("p", { class: "controls" }, link(to(`/step/${neighbour(step, -1)}`), "← previous step"), link(to(`/step/${neighbour(step, 1)}`), "next step →"), link(to(`/timeline?step=${step}`), "timeline")),
    section(`Step ${step}`, element("div", { class: "charts" }, histogram("reward", column("score")), histogram("length", column("length")),
      histogram("advantage", column("advantage")), parts.length > 1 ? parts.map((name) => histogram(name, column(name))) : null)),
    section("Groups", groupList(groups)));
}

function neighbour(step, by) {
  const at = run.steps.indexOf(step) + by;
  return run.steps[Math.max(0, Math.min(run.steps.length - 1, at))];
}

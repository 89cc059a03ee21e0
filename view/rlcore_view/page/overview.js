// Overview, and the page of configuration and plan.

const OVERVIEW_METRICS = ["reward/mean", "completion/length_mean", "completion/clipped_frac", "reward/zero_std_frac", "policy/entropy", "policy/kl", "actor/grad_norm", "policy/rollout_logprob_diff"];
const HELD_OUT = /^eval\/.*\/mean$/;

function overviewPage() {
  const findings = run.findings.map(([name, evidence, advice]) =>
    element("div", { class: "finding", role: "alert" }, element("strong", {}, name), `: ${evidence}; ${advice}`));
  const alerts = run.alerts.length ? element("details", { class: "alerts" }, element("summary", {}, `${run.alerts.length} warnings and errors in the log`),
    element("pre", {}, run.alerts.join("\n"))) : null;
  return element("div", {}, element("h2", { class: "unseen" }, "Overview"), factsOf(), findings, alerts, run.notes.map((note) => element("p", { class: "note" }, note)), overviewCharts());
}

function factsOf() {
  const rewards = run.metrics["reward/mean"] || meansByStep(0);
  const best = rewards.reduce((most, point) => (!most || point[1] > most[1] ? point : most), null);
  const held = Object.keys(run.metrics).filter((name) => HELD_OUT.test(name)).map((name) => [`held-out ${name.slice(5, -5)}`, numberText(run.metrics[name].at(-1)?.[1])]);
  const cut = run.columns.truncated.filter(isNumber);
  return facts([["steps", run.steps.length], ["samples", run.size], ["prompts", run.prompts.length], ["last reward", numberText(rewards.at(-1)?.[1])],
    best ? ["best reward", `${numberText(best[1])} in step ${best[0]}`] : null, cut.length ? ["truncated", percent(meanOf(cut))] : null, ...held.slice(0, 4)].filter(Boolean));
}

function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function percent(share) {
  return isNumber(share) ? `${Math.round(100 * share)} %` : "–";
}

function overviewCharts() {
  const evaluated = Object.keys(run.metrics).filter((name) => HELD_OUT.test(name));
  const shown = OVERVIEW_METRICS.filter((name) => run.metrics[name]?.length);
  const charts = evaluated.length ? [lineChart("held-out reward", evaluated.map((name) => ({ name: name.slice(5, -5), points: run.metrics[name] })))] : [];
  charts.push(...shown.map((name) => lineChart(name, [{ name, points: run.metrics[name] }])));
  if (!shown.length && run.steps.length > 1) charts.push(lineChart("mean reward", [{ name: "reward", points: meansByStep(0) }]));
  const others = Object.keys(run.metrics).filter((name) => !shown.includes(name) && !evaluated.includes(name) && run.metrics[name].length);
  const more = element("details", {}, element("summary", {}, `${others.length} more metrics`));
  more.addEventListener("toggle", () => {
    if (more.children.length === 1) more.append(element("div", { class: "charts" }, others.map((name) => lineChart(name, [{ name, points: run.metrics[name] }]))));
  });
  const whole = shown.length ? null : histogram("reward", scoresOf(indicesWhere(() => true)));
  return element("div", {}, element("div", { class: "charts" }, charts, whole), others.length ? more : null);
}

function meansByStep(lane, of = run) {
  const found = new Map();
  of.columns.step.forEach((step, index) => {
    if (of.columns.lane[index] !== lane || of.columns.segment[index] || !isNumber(of.columns.score[index])) return;
    if (!found.has(step)) found.set(step, []);
    found.get(step).push(of.columns.score[index]);
  });
  return [...found].sort((a, b) => a[0] - b[0]).map(([step, values]) => [step, meanOf(values)]);
}

function configPage(query) {
  const wanted = (query.get("q") || "").toLowerCase();
  const rows = run.settings.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(wanted));
  const settings = run.settings.length
    ? [element("div", { class: "controls" }, field("filter", query.get("q") || "", "a key or a value", setQuery("/config", query, "q")), element("span", { class: "hint" }, `${rows.length} of ${run.settings.length} keys`)),
      table(["key", "value"], rows.map(([key, value]) => [element("code", {}, key), element("code", {}, value)]), "configuration")]
    : run.config ? element("pre", {}, run.config) : element("p", {}, "no configuration was recorded");
  return element("div", {}, planOf(run.plan), section("Configuration", settings));
}

// The plan's parts that people ask for; the whole of it below.
function planOf(plan) {
  if (!Object.keys(plan).length) return null;
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const workers = isObject(plan.workers) ? Object.entries(plan.workers).filter(([, worker]) => isObject(worker)) : [];
  const columns = ["backend", "pool", "replicas", "ranks", "gpus", "threads", "embedded_in"];
  const batch = isObject(plan.arithmetic) ? Object.entries(plan.arithmetic).filter(([, value]) => isNumber(value)) : [];
  const parts = isObject(plan.components) ? Object.entries(plan.components).map(([slot, part]) => [slot, String(part?.name ?? "")]) : [];
  const notes = Array.isArray(plan.notes) ? plan.notes : [];
  return section("Plan", parts.length || batch.length ? facts([...parts, ...batch.map(([name, value]) => [name.replaceAll("_", " "), value])]) : null,
    workers.length ? table(["worker", ...columns], workers.map(([role, worker]) => [role, ...columns.map((name) => String(worker[name] ?? "–"))]), "workers") : null,
    notes.length ? element("ul", { class: "note" }, notes.map((note) => element("li", {}, String(note)))) : null,
    element("details", {}, element("summary", {}, "the whole plan"), element("pre", {}, JSON.stringify(plan, null, 1))));
}

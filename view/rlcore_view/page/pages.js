// The pages: each returns its element, or a promise of it.

const OVERVIEW_METRICS = ["reward/mean", "completion/length_mean", "completion/clipped_frac", "reward/zero_std_frac", "policy/entropy", "policy/kl", "actor/grad_norm", "policy/rollout_logprob_diff"];

function overviewPage() {
  const findings = run.findings.map(([name, evidence, advice]) =>
    element("div", { class: "finding", role: "alert" }, element("strong", {}, name), `: ${evidence}; ${advice}`));
  const notes = run.notes.map((note) => element("p", { class: "note" }, note));
  const evaluated = Object.keys(run.metrics).filter((name) => /^eval\/.*\/mean$/.test(name));
  const shown = OVERVIEW_METRICS.filter((name) => run.metrics[name]?.length);
  const charts = evaluated.length ? [lineChart("held-out reward", evaluated.map((name) => ({ name: name.slice(5, -5), points: run.metrics[name] })))] : [];
  charts.push(...shown.map((name) => lineChart(name, [{ name, points: run.metrics[name] }])));
  if (!shown.length) charts.push(lineChart("mean reward", [{ name: "reward", points: meansByStep(0) }]));
  const others = Object.keys(run.metrics).filter((name) => !shown.includes(name) && !evaluated.includes(name));
  const more = element("details", {}, element("summary", {}, `${others.length} more metrics`));
  more.addEventListener("toggle", () => {
    if (more.children.length === 1) more.append(element("div", { class: "charts" }, others.map((name) => lineChart(name, [{ name, points: run.metrics[name] }]))));
  });
  return element("div", {}, findings, notes, element("div", { class: "charts" }, charts), others.length ? more : null,
    run.config && element("details", {}, element("summary", {}, "configuration"), element("pre", {}, run.config)),
    Object.keys(run.plan).length ? element("details", {}, element("summary", {}, "plan"), element("pre", {}, JSON.stringify(run.plan, null, 1))) : null);
}

function meansByStep(lane) {
  const found = new Map();
  run.columns.step.forEach((step, index) => {
    if (run.columns.lane[index] !== lane || !isNumber(run.columns.score[index])) return;
    if (!found.has(step)) found.set(step, []);
    found.get(step).push(run.columns.score[index]);
  });
  return [...found].sort((a, b) => a[0] - b[0]).map(([step, values]) => [step, meanOf(values)]);
}

function stepsPage() {
  const rows = run.steps.map((step) => {
    const indices = indicesWhere((index) => run.columns.step[index] === step);
    const trained = indices.filter((index) => run.columns.lane[index] === 0);
    const cut = trained.filter((index) => run.columns.truncated[index]).length;
    const scores = scoresOf(trained);
    return [link(`#/step/${step}`, String(step)), String(trained.length), numberText(meanOf(scores)), numberText(spreadOf(scores)),
      numberText(meanOf(trained.map((index) => run.columns.length[index]))), trained.length ? `${Math.round((100 * cut) / trained.length)} %` : "–",
      String(indices.length - trained.length)];
  });
  return section("Steps", table(["step", "samples", "mean reward", "spread", "mean length", "truncated", "evaluated"], rows));
}

function stepPage(step) {
  const indices = indicesWhere((index) => run.columns.step[index] === step && run.columns.lane[index] === 0);
  const column = (name) => indices.map((index) => run.columns[name][index]);
  const parts = componentNames();
  const groups = run.groups.map((group, number) => number).filter((number) => run.groups[number].step === step);
  return element("div", {}, element("p", { class: "controls" }, link(`#/step/${neighbour(step, -1)}`, "← previous step"), link(`#/step/${neighbour(step, 1)}`, "next step →")),
    section(`Step ${step}`, element("div", { class: "charts" }, histogram("reward", column("score")), histogram("length", column("length")),
      histogram("advantage", column("advantage")), parts.length > 1 ? parts.map((name) => histogram(name, column(name))) : null)),
    section("Groups", groupList(groups)));
}

function neighbour(step, by) {
  const at = run.steps.indexOf(step) + by;
  return run.steps[Math.max(0, Math.min(run.steps.length - 1, at))];
}

const ORDERS = {
  recorded: { text: "as recorded", key: (group, number) => number },
  spread: { text: "spread of the reward", key: (group) => -spreadOf(scoresOf(group.samples)) },
  best: { text: "mean reward, best first", key: (group) => -(meanOf(scoresOf(group.samples)) ?? -Infinity) },
  worst: { text: "mean reward, worst first", key: (group) => meanOf(scoresOf(group.samples)) ?? Infinity },
  disagreement: { text: "disagreement of components", key: (group) => -disagreement(group) },
};

// How far the components of a group point in different directions: the largest gap of their ranks.
function disagreement(group) {
  const parts = componentNames();
  let most = 0;
  for (const index of group.samples) {
    const shares = parts.map((name) => {
      const values = group.samples.map((other) => run.columns[name][other]);
      const low = Math.min(...values.filter(isNumber));
      return spreadOf(values) ? (run.columns[name][index] - low) / spreadOf(values) : 0.5;
    }).filter(isNumber);
    most = Math.max(most, spreadOf(shares));
  }
  return most;
}

function groupsPage(query) {
  const order = ORDERS[query.get("sort")] ? query.get("sort") : "recorded";
  const lane = query.get("lane") === "eval" ? 1 : 0;
  const keyed = run.groups.map((group, number) => [ORDERS[order].key(group, number), number]).filter(([, number]) => run.groups[number].lane === lane);
  keyed.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const set = (name) => (value) => { query.set(name, value); location.hash = `#/groups?${query}`; };
  return section("Groups", element("div", { class: "controls" },
    choice("sort by", Object.entries(ORDERS).map(([key, { text }]) => [key, text]), order, set("sort")),
    choice("lane", [["train", "training"], ["eval", "evaluation"]], lane ? "eval" : "train", set("lane"))),
  groupList(keyed.map(([, number]) => number)));
}

function groupList(numbers) {
  if (!numbers.length) return element("p", {}, "no groups");
  return growingList(numbers.length, (at) => {
    const group = run.groups[numbers[at]];
    return element("a", { class: "row", href: groupAddress(numbers[at]) }, element("span", { class: "step" }, `step ${group.step}${group.lane ? ", eval" : ""}`),
      element("span", { class: "name" }, run.prompts[group.prompt]), element("span", { class: "scores" }, group.samples.map(scoreBadge)));
  });
}

async function groupPage(number) {
  const group = run.groups[number];
  if (!group) return element("p", {}, "there is no such group");
  const bodies = await Promise.all(group.samples.map(bodyOf));
  const shown = bodies.find((body) => body);
  const texts = bodies.map((body) => (body ? textOf(body.completion) : ""));
  const shared = sharedPrefix(texts.filter((text) => text));
  const cards = group.samples.map((index, at) => element("article", { class: "card" },
    element("header", {}, link(sampleAddress(index), `sample ${run.columns.sample[index]}`), scoreBadge(index),
      element("span", { class: "hint" }, `advantage ${numberText(run.columns.advantage[index])}, ${numberText(run.columns.length[index])} tokens${run.columns.truncated[index] ? ", truncated" : ""}`)),
    element("pre", {}, bodies[at] ? [element("span", { class: "same" }, texts[at].slice(0, shared)), texts[at].slice(shared)] : "left out of this page")));
  const others = run.groups.map((other, at) => at).filter((at) => run.groups[at].prompt === group.prompt && at !== number);
  return element("div", {}, section(`${run.prompts[group.prompt]}, step ${group.step}`, shown ? messageList(shown.prompt) : null,
    shown && shown.answer !== null ? element("p", {}, "answer: ", element("code", {}, typeof shown.answer === "string" ? shown.answer : JSON.stringify(shown.answer))) : null,
    element("div", { class: "cards" }, cards)), others.length ? section("The same prompt at other steps", groupList(others)) : null);
}

function sharedPrefix(texts) {
  if (texts.length < 2) return 0;
  let length = 0;
  while (length < texts[0].length && texts.every((text) => text[length] === texts[0][length])) length++;
  return length;
}

function promptsPage(query) {
  const rows = run.prompts.map((name, prompt) => ({ name, prompt, cells: new Map(), scores: [] }));
  run.groups.forEach((group, number) => {
    if (group.lane !== 0) return;
    rows[group.prompt].cells.set(group.step, number);
    rows[group.prompt].scores.push([group.step, meanOf(scoresOf(group.samples))]);
  });
  const trained = rows.filter((row) => row.cells.size);
  const kinds = { never: 0, always: 0, forgotten: 0, mixed: 0 };
  for (const row of trained) { row.kind = kindOf(row.scores); kinds[row.kind]++; }
  const wanted = query.get("kind") || "all";
  const shown = trained.filter((row) => wanted === "all" || row.kind === wanted);
  const set = (value) => { location.hash = `#/prompts?kind=${value}`; };
  return section("Prompts", element("div", { class: "controls" }, choice("show", [["all", `all ${trained.length}`], ...Object.entries(kinds).map(([kind, count]) => [kind, `${kind}: ${count}`])], wanted, set),
    element("span", { class: "hint" }, "a cell is a group's mean reward; never: always the lowest reward of the run, always: always the highest")),
  heatMap(shown.slice(0, 500), run.steps), shown.length > 500 ? element("p", { class: "note" }, `${shown.length - 500} more prompts are not drawn`) : null);
}

function kindOf(scores) {
  const [low, high] = scoreRange();
  const known = [...scores].sort((a, b) => a[0] - b[0]).map(([, mean]) => mean).filter(isNumber);
  if (known.every((mean) => mean <= low)) return "never";
  if (known.every((mean) => mean >= high)) return "always";
  return Math.max(...known) >= high && known.at(-1) <= (low + high) / 2 ? "forgotten" : "mixed";
}

async function samplePage(index, query) {
  if (!(index >= 0 && index < run.size)) return element("p", {}, "there is no such sample");
  const { columns } = run;
  const body = await bodyOf(index);
  const facts = [["step", link(`#/step/${columns.step[index]}`, String(columns.step[index]))], ["group", link(groupAddress(run.groupOf[index]), run.prompts[columns.prompt[index]])],
    ["reward", scoreBadge(index)], ...componentNames().map((name) => [name.slice(7), numberText(columns[name][index])]), ["advantage", numberText(columns.advantage[index])],
    ["tokens", `${numberText(columns.length[index])}${columns.truncated[index] ? ", truncated" : ""}`]];
  const top = element("div", {}, element("p", { class: "controls" }, link(sampleAddress(Math.max(0, index - 1)), "← previous"), link(sampleAddress(Math.min(run.size - 1, index + 1)), "next →")),
    element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  if (!body) return element("div", {}, top, element("p", { class: "note" }, "The text of this sample was left out of the page."));
  const shade = (value) => { query.set("shade", value); location.hash = `#/sample/${index}?${query}`; };
  return element("div", {}, top,
    section("Conversation", messageList(body.prompt), typeof body.completion === "string" ? messageList([{ role: "assistant", content: body.completion }]) : messageList(body.completion),
      body.answer !== null ? element("p", {}, "answer: ", element("code", {}, typeof body.answer === "string" ? body.answer : JSON.stringify(body.answer))) : null),
    body.tokens ? section("Tokens", tokenView(body.tokens, query.get("shade"), shade)) : null,
    element("details", {}, element("summary", {}, "everything recorded"), element("pre", {}, JSON.stringify({ versions: body.versions, ...body.info }, null, 1))));
}

function messageList(messages) {
  return element("div", { class: "messages" }, messages.map((message) => element("div", { class: `message ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "other"}` },
    element("b", {}, message.role ?? "?", message.name ? ` ${message.name}` : ""), element("pre", {}, contentOf(message)),
    message.tool_calls ? element("pre", { class: "call" }, JSON.stringify(message.tool_calls, null, 1)) : null)));
}

async function searchPage(query) {
  const wanted = (query.get("q") || "").toLowerCase();
  const found = [];
  for (let index = 0; wanted && index < run.size && found.length < 500; index++) {
    const body = await bodyOf(index);
    if (body && `${JSON.stringify(body.prompt)}\n${textOf(body.completion)}`.toLowerCase().includes(wanted)) found.push(index);
  }
  return section(`${found.length}${found.length === 500 ? " and more" : ""} samples with “${wanted}”`, growingList(found.length, (at) => element("a", { class: "row", href: sampleAddress(found[at]) },
    element("span", { class: "step" }, `step ${run.columns.step[found[at]]}`), element("span", { class: "name" }, run.prompts[run.columns.prompt[found[at]]]), scoreBadge(found[at]))));
}

function indicesWhere(test) {
  const found = [];
  for (let index = 0; index < run.size; index++) if (test(index)) found.push(index);
  return found;
}

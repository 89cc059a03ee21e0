// Compare: curves with bands over seeds, configurations, and two runs on the same prompts.

function comparePage(query) {
  const bands = familiesOf();
  const names = [...new Set(runs.flatMap((of) => Object.keys(of.metrics)))];
  const first = [...names.filter((name) => HELD_OUT.test(name)), ...OVERVIEW_METRICS].filter((name) => names.includes(name));
  const charts = first.map((name) => familyChart(name, bands, (of) => of.metrics[name] || [])).filter(Boolean);
  if (!charts.length) charts.push(familyChart("mean reward", bands, (of) => meansByStep(0, of)));
  const others = names.filter((name) => !first.includes(name) && !name.startsWith("time/"));
  const more = element("details", {}, element("summary", {}, `${others.length} more metrics`));
  more.addEventListener("toggle", () => { if (more.children.length === 1) more.append(element("div", { class: "charts" }, others.map((name) => familyChart(name, bands, (of) => of.metrics[name] || [])))); });
  return element("div", {}, section("Compare", element("p", { class: "hint" }, bands.some((band) => band.members.length > 1) ? "Runs that differ in their seed alone are one curve: their mean, and a band from the lowest to the highest." : null),
    table(["run", "format", "steps", "samples", "last reward"], runs.map((of) => [link(to("/", of), of.name), of.format, String(of.steps.length), String(of.size), numberText((of.metrics["reward/mean"] || meansByStep(0, of)).at(-1)?.[1])]), "runs"),
    element("div", { class: "charts" }, charts), others.length ? more : null), changesTable(), sharedPrompts(query));
}

function familiesOf() {
  const found = new Map();
  runs.forEach((of, number) => {
    const family = about.families[number];
    if (!found.has(family)) found.set(family, { members: [] });
    found.get(family).members.push(of);
  });
  return [...found.values()].map((band) => ({ ...band, name: band.members.length > 1 ? `${band.members[0].name} and ${band.members.length - 1} more seed${band.members.length > 2 ? "s" : ""}` : band.members[0].name }));
}

function familyChart(title, bands, pointsOf) {
  const series = bands.map((band, at) => {
    const byStep = new Map();
    for (const of of band.members) for (const [step, value] of pointsOf(of)) byStep.set(step, [...(byStep.get(step) || []), value]);
    const rows = [...byStep].sort((a, b) => a[0] - b[0]);
    return { name: band.name, colour: COLOURS[at % COLOURS.length], points: rows.map(([step, values]) => [step, meanOf(values)]), band: band.members.length > 1 ? rows.map(([step, values]) => [step, ...rangeOf(values)]) : null };
  });
  return series.some((line) => line.points.length) ? lineChart(title, series) : null;
}

function changesTable() {
  if (!about.changes.length) return null;
  return section("Configurations differ in", table(["key", ...runs.map((of) => of.name)], about.changes.map(([key, values]) => [element("code", {}, key), ...values.map((value) => element("code", {}, value ?? "not set"))]), "differences of the configurations"));
}

function pair(query) {
  const number = (name, other) => { const asked = Number(query.get(name) ?? other); return runs[asked] ? asked : other; };
  return [number("a", 0), number("b", Math.min(1, runs.length - 1))];
}

function pairChoices(path, query) {
  const [a, b] = pair(query);
  const names = runs.map((of, number) => [number, of.name]);
  return [choice("left", names, a, setQuery(path, query, "a")), choice("right", names, b, setQuery(path, query, "b"))];
}

function sharedPrompts(query) {
  const [a, b] = pair(query);
  const rightRows = promptRows(runs[b]);
  const [right, names] = [new Map(rightRows.map((row) => [runs[b].questions[row.prompt], row])), new Set(rightRows.map((row) => row.name))];
  const sharing = promptRows(runs[a]).filter((row) => names.has(row.name)).map((row) => ({ row, other: right.get(runs[a].questions[row.prompt]) }));
  const rows = sharing.filter(({ other }) => other).map(({ row, other }) => ({ row, other, gap: (other.mean ?? 0) - (row.mean ?? 0) }));
  const leftOut = sharing.length - rows.length;
  rows.sort((one, two) => Math.abs(two.gap) - Math.abs(one.gap));
  const line = (at) => {
    const { row, other, gap } = rows[at];
    return element("a", { class: "row", href: to(`/compare/${row.prompt}?a=${a}&b=${b}`, null) }, element("span", { class: "name" }, row.name), ...[row.mean, other.mean].map((mean) => element("span", { class: "badge", style: { background: scaleColour(mean, runs[a].range) } }, numberText(mean))),
      element("span", { class: "hint number" }, `${gap > 0 ? "+" : ""}${numberText(gap)}`));
  };
  return section("The same prompts", element("div", { class: "controls" }, pairChoices("/compare", query), element("span", { class: "hint" }, `${rows.length} prompts of both, mean reward left and right, largest difference first${leftOut ? `; ${leftOut} of the same name are other questions in each run, and left out` : ""}`)),
    rows.length ? growingList(rows.length, line) : element("p", {}, "the two runs share no prompt"));
}

async function comparePromptPage(prompt, query) {
  const [a, b] = pair(query);
  const name = runs[a].prompts[prompt];
  const sides = await Promise.all([a, b].map((number, side) => compareSide(runs[number], runs[a].questions[prompt], query, side ? "right" : "left", prompt)));
  const bodies = sides.flatMap((side) => [...side.bodies.values()]).filter(Boolean);
  return section(name ?? "there is no such prompt", link(to(`/compare?a=${a}&b=${b}`, null), "all prompts"), bodies.length ? messageList(bodies[0].prompt) : null, bodies.length ? answerOf(bodies[0]) : null, element("div", { class: "sides" }, sides.map((side) => side.shown)));
}

async function compareSide(of, question, query, side, prompt) {
  const number = of.questions.indexOf(question);
  const groups = of.groups.filter((group) => group.prompt === number && group.lane === 0);
  if (!groups.length) return { bodies: new Map(), shown: section(of.name, element("p", {}, "this run did not train on it")) };
  const group = groups.find((found) => String(found.step) === query.get(side)) || groups.at(-1);
  const bodies = new Map(await Promise.all(group.samples.map(async (index) => [index, await bodyOf(index, of)])));
  const steps = choice("step", groups.map((found) => [found.step, `${found.step}: mean ${numberText(meanOf(scoresOf(found.samples, of)))}`]), group.step, setQuery(`/compare/${prompt}`, query, side));
  return { bodies, shown: section(of.name, element("div", { class: "controls" }, steps), sampleCards(bestFirst(group.samples, of), bodies, "words", of)) };
}

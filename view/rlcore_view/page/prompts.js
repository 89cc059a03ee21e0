// Prompts: the mean reward of each over the run.

const KINDS = { never: "always the lowest reward of the run", always: "always the highest", forgotten: "once the highest, at the end below the middle", mixed: "all others" };
const PROMPT_ORDERS = {
  recorded: ["as recorded", (row) => row.prompt],
  name: ["name", null],
  worst: ["mean, worst first", (row) => row.mean ?? Infinity],
  best: ["mean, best first", (row) => -(row.mean ?? -Infinity)],
  gained: ["gained most", (row) => -(row.gain ?? -Infinity)],
  lost: ["lost most", (row) => row.gain ?? Infinity],
  seen: ["seen most often", (row) => -row.scores.length],
};

// A row per prompt that was trained on: [step, mean, group] of each time.
function promptRows(of = run) {
  const rows = of.prompts.map((name, prompt) => ({ name, prompt, scores: [] }));
  of.groups.forEach((group, number) => { if (group.lane === 0) rows[group.prompt].scores.push([group.step, meanOf(scoresOf(group.samples, of)), number]); });
  const trained = rows.filter((row) => row.scores.length);
  for (const row of trained) {
    row.scores.sort((a, b) => a[0] - b[0]);
    const known = row.scores.map(([, mean]) => mean).filter(isNumber);
    row.mean = meanOf(known);
    row.gain = known.length ? known.at(-1) - known[0] : null;
    row.kind = kindOf(known, of.range);
  }
  return trained;
}

function kindOf(known, [low, high]) {
  if (known.every((mean) => mean <= low)) return "never";
  if (known.every((mean) => mean >= high)) return "always";
  return Math.max(...known) >= high && known.at(-1) <= (low + high) / 2 ? "forgotten" : "mixed";
}

function promptsPage(query) {
  const trained = promptRows();
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, trained.filter((row) => row.kind === kind).length]));
  const [wanted, text] = [query.get("kind") || "all", (query.get("q") || "").toLowerCase()];
  const order = Object.hasOwn(PROMPT_ORDERS, query.get("sort") ?? "") ? query.get("sort") : "recorded";
  const shown = trained.filter((row) => (wanted === "all" || row.kind === wanted) && row.name.toLowerCase().includes(text));
  const key = PROMPT_ORDERS[order][1];
  shown.sort(key ? (a, b) => key(a) - key(b) || a.prompt - b.prompt : (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const set = (name) => setQuery("/prompts", query, name);
  return section("Prompts", element("div", { class: "controls" },
    choice("show", [["all", `all ${trained.length}`], ...Object.entries(counts).map(([kind, count]) => [kind, `${kind}: ${count}`])], wanted, set("kind")),
    choice("sort by", Object.entries(PROMPT_ORDERS).map(([name, [words]]) => [name, words]), order, set("sort")), field("prompt", query.get("q") || "", "part of its name", set("q"))),
  element("p", { class: "hint" }, Object.entries(KINDS).map(([kind, words]) => `${kind}: ${words}`).join(" · ")), heatMap(shown));
}

// Rows of prompts, columns of steps; a cell is the mean reward of one group.
function heatMap(rows) {
  if (!rows.length) return element("p", {}, "no prompts");
  const places = new Map(run.steps.map((step, at) => [step, at]));
  const cell = Math.max(3, Math.min(26, Math.floor(800 / run.steps.length)));
  const line = (at) => {
    const row = rows[at];
    const drawn = svg("svg", { width: run.steps.length * cell, height: 15, role: "img", "aria-label": `${row.name}: mean reward ${numberText(row.mean)}, ${row.scores.length} times, ${row.kind}` });
    for (const [step, mean, group] of row.scores) {
      const box = svg("rect", { x: places.get(step) * cell, y: 0, width: Math.max(2, cell - 1), height: 14, rx: 1.5, fill: isNumber(mean) ? scaleColour(mean, run.range) : "gray", class: "cell" }, svg("title", {}, `step ${step}: mean reward ${numberText(mean)}`));
      box.addEventListener("click", () => { location.hash = groupAddress(group); });
      drawn.append(box);
    }
    return element("div", { class: "heat" }, element("a", { class: "name", href: to(`/prompt/${row.prompt}`) }, row.name), element("span", { class: "mean" }, numberText(row.mean)), element("span", { class: "kind" }, row.kind), drawn);
  };
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "mean reward per prompt and step" }, element("div", { class: "heat head hint" }, element("span", { class: "name" }, "prompt"), element("span", { class: "mean" }, "mean"), element("span", { class: "kind" }, "kind"), `steps ${run.steps[0]} to ${run.steps.at(-1)}`), growingList(rows.length, line, 100));
}

function promptPage(prompt) {
  const groups = run.groups.map((group, number) => number).filter((number) => run.groups[number].prompt === prompt);
  if (!groups.length) return element("p", {}, "there is no such prompt");
  const trained = groups.filter((number) => run.groups[number].lane === 0).sort((a, b) => run.groups[a].step - run.groups[b].step);
  const rows = trained.map((number) => [run.groups[number].step, scoresOf(run.groups[number].samples).filter(isNumber)]).filter(([, scores]) => scores.length);
  const chart = lineChart("reward: mean, lowest to highest", [{ name: "mean", points: rows.map(([step, scores]) => [step, meanOf(scores)]), band: rows.map(([step, scores]) => [step, ...rangeOf(scores)]) }]);
  return section(run.prompts[prompt], rows.length > 1 ? element("div", { class: "charts" }, chart) : null, groupList(groups));
}

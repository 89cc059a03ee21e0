// Groups: the samples of a prompt side by side.

const ORDERS = {
  recorded: { text: "as recorded", key: (group, number) => number },
  spread: { text: "spread of the reward", key: (group) => -spreadOf(scoresOf(group.samples)) },
  best: { text: "mean reward, best first", key: (group) => -(meanOf(scoresOf(group.samples)) ?? -Infinity) },
  worst: { text: "mean reward, worst first", key: (group) => meanOf(scoresOf(group.samples)) ?? Infinity },
  disagreement: { text: "disagreement of components", key: (group) => -disagreement(group) },
};
const MARKS = [["words", "words that differ from the best"], ["none", "nothing"]];

// How far the components of a group point in different directions: the largest gap of their ranks.
function disagreement(group) {
  const parts = componentNames();
  let most = 0;
  for (const index of group.samples) {
    const shares = parts.map((name) => {
      const values = group.samples.map((other) => run.columns[name][other]);
      return spreadOf(values) ? (run.columns[name][index] - rangeOf(values)[0]) / spreadOf(values) : 0.5;
    }).filter(isNumber);
    most = Math.max(most, spreadOf(shares));
  }
  return most;
}

function groupsPage(query) {
  const order = Object.hasOwn(ORDERS, query.get("sort") ?? "") ? query.get("sort") : "recorded";
  const lane = query.get("lane") === "eval" ? 1 : 0;
  const wanted = (query.get("q") || "").toLowerCase();
  const fits = (group) => group.lane === lane && run.prompts[group.prompt].toLowerCase().includes(wanted);
  const keyed = run.groups.map((group, number) => [group, number]).filter(([group]) => fits(group)).map(([group, number]) => [ORDERS[order].key(group, number), number]);
  keyed.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  return section("Groups", element("div", { class: "controls" },
    choice("sort by", Object.entries(ORDERS).map(([key, { text }]) => [key, text]), order, setQuery("/groups", query, "sort")),
    choice("lane", [["train", "training"], ["eval", "evaluation"]], lane ? "eval" : "train", setQuery("/groups", query, "lane")),
    field("prompt", query.get("q") || "", "part of its name", setQuery("/groups", query, "q")), element("span", { class: "hint" }, `${keyed.length} groups`)),
  groupList(keyed.map(([, number]) => number)));
}

function groupList(numbers, of = run) {
  if (!numbers.length) return element("p", {}, "no groups");
  return growingList(numbers.length, (at) => {
    const group = of.groups[numbers[at]];
    return element("a", { class: "row", href: groupAddress(numbers[at], of) }, element("span", { class: "step" }, `step ${group.step}${group.lane ? ", eval" : ""}`),
      element("span", { class: "name" }, of.prompts[group.prompt]), element("span", { class: "scores" }, group.samples.slice(0, 64).map((index) => scoreBadge(index, of)), group.samples.length > 64 ? `and ${group.samples.length - 64} more` : null));
  });
}

async function groupPage(number, query) {
  const group = run.groups[number];
  if (!group) return element("p", {}, "there is no such group");
  const marks = query.get("marks") === "none" ? "none" : "words";
  const sorted = query.get("order") === "recorded" ? group.samples : bestFirst(group.samples);
  const bodies = new Map(await Promise.all(group.samples.map(async (index) => [index, await bodyOf(index)])));
  const shown = [...bodies.values()].find((body) => body);
  const set = (name) => setQuery(`/group/${number}`, query, name);
  const others = run.groups.map((other, at) => at).filter((at) => run.groups[at].prompt === group.prompt && at !== number);
  return element("div", {}, section(`${run.prompts[group.prompt]}, step ${group.step}`, link(to(`/prompt/${group.prompt}`), "this prompt over the run"), shown ? messageList(shown.prompt) : null, answerOf(shown),
    group.samples.length > 1 && element("div", { class: "controls" }, choice("order", [["best", "best first"], ["recorded", "as recorded"]], query.get("order") === "recorded" ? "recorded" : "best", set("order")), choice("mark", MARKS, marks, set("marks")),
      marks === "words" ? element("span", { class: "hint" }, element("ins", { class: "new" }, "only here"), " ", element("del", { class: "gone" }, "only in the best")) : null),
    sampleCards(sorted, bodies, marks)), others.length ? section("The same prompt at other steps", groupList(others)) : null);
}

function bestFirst(indices, of = run) {
  return [...indices].sort((a, b) => (of.columns.score[b] ?? -Infinity) - (of.columns.score[a] ?? -Infinity) || a - b);
}

function answerOf(body) {
  if (!body || body.answer === null || body.answer === undefined || body.answer === "") return null;
  return element("p", {}, "answer: ", element("code", {}, typeof body.answer === "string" ? body.answer : JSON.stringify(body.answer)));
}

// A card per sample; each is compared with the best one whose text is in the page.
function sampleCards(indices, bodies, marks, of = run) {
  const best = bestFirst(indices, of).find((index) => bodies.get(index));
  const standard = best === undefined ? "" : textOf(bodies.get(best).completion);
  return element("div", { class: "cards" }, indices.map((index) => {
    const body = bodies.get(index);
    const text = body ? textOf(body.completion) : null;
    const { columns } = of;
    return element("article", { class: "card" },
      element("header", {}, link(sampleAddress(index, of), `sample ${columns.sample[index]}`), scoreBadge(index, of),
        element("span", { class: "hint" }, [isNumber(columns.advantage[index]) && `advantage ${numberText(columns.advantage[index])}`, isNumber(columns.length[index]) && `${columns.length[index]} tokens`, columns.truncated[index] && "truncated", index === best && indices.length > 1 && "the best"].filter(Boolean).join(", "))),
      componentBar(index, of), text === null ? element("p", { class: "note" }, "left out of this page") : marks === "words" && index !== best ? markedText(standard, text) : longText(text));
  }));
}

// The components of a sample's reward as one bar; those below 0 are hatched by a border.
function componentBar(index, of) {
  const parts = componentNames(of).map((name, at) => [name.slice(7), of.columns[name][index], COLOURS[at % COLOURS.length]]).filter(([, value]) => isNumber(value));
  if (parts.length < 2) return null;
  const whole = parts.reduce((sum, [, value]) => sum + Math.abs(value), 0) || 1;
  const text = parts.map(([name, value]) => `${name} ${numberText(value)}`).join(", ");
  return element("div", { class: "components", role: "img", "aria-label": text, title: text },
    parts.map(([, value, colour]) => element("i", { style: { width: `${(100 * Math.abs(value)) / whole}%`, background: value < 0 ? "transparent" : colour, borderColor: colour } })));
}

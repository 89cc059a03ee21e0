// Samples: the list with its filter, and one sample with its conversation and tokens.

const SAMPLE_ORDERS = { recorded: "as recorded", reward: "reward, lowest first", "-reward": "reward, highest first", "-advantage": "advantage, highest first", advantage: "advantage, lowest first", "-length": "longest first", length: "shortest first" };

function samplesPage(query) {
  const where = query.get("where") || "";
  const order = Object.hasOwn(SAMPLE_ORDERS, query.get("sort") ?? "") ? query.get("sort") : "recorded";
  const set = (name) => setQuery("/samples", query, name);
  const controls = element("div", { class: "controls" }, field("where", where, "reward < 0.1 and truncated", set("where")), choice("sort by", Object.entries(SAMPLE_ORDERS), order, set("sort")));
  const words = (found) => `${found.length} of ${run.size} samples`;
  try {
    const test = where.trim() ? filterOf(where) : () => true;
    if (test.readsText) return section("Samples", controls, searchedList(test, order, words));
    const found = inOrder(indicesWhere((index) => test(run, index)), order, run);
    controls.append(element("span", { class: "hint" }, words(found)));
    return section("Samples", controls, growingList(found.length, (at) => sampleRow(found[at])));
  } catch (error) {
    return section("Samples", controls, problemText(error));
  }
}

function problemText(error) {
  return element("p", { class: "finding", role: "alert" }, error.message);
}

function inOrder(indices, order, of) {
  if (order === "recorded") return indices.sort((a, b) => a - b);
  const name = order.replace("-", "");
  const sign = order.startsWith("-") ? -1 : 1;
  const column = of.columns[name === "reward" ? "score" : name];
  return indices.sort((a, b) => sign * ((column[a] ?? sign * Infinity) - (column[b] ?? sign * Infinity)) || a - b);
}

async function samplePage(index, query) {
  if (!(index >= 0 && index < run.size)) return element("p", {}, "there is no such sample");
  const { columns } = run;
  const body = await bodyOf(index);
  const top = element("div", {}, element("p", { class: "controls" }, link(sampleAddress(Math.max(0, index - 1)), "← previous"), link(sampleAddress(Math.min(run.size - 1, index + 1)), "next →")),
    facts([["step", link(to(`/step/${columns.step[index]}`), String(columns.step[index]))], ["group", link(groupAddress(run.groupOf[index]), run.prompts[columns.prompt[index]])],
      ["reward", scoreBadge(index)], ...componentNames().map((name) => [name.slice(7), numberText(columns[name][index])]), ["advantage", numberText(columns.advantage[index])],
      ["tokens", `${numberText(columns.length[index])}${columns.truncated[index] ? ", truncated" : ""}`], run.sources.length > 1 ? ["source", run.sources[columns.source[index]]] : null].filter(Boolean)));
  if (!body) return element("div", {}, top, element("p", { class: "note" }, "The text of this sample was left out of the page."));
  return element("div", {}, top,
    section("Conversation", messageList(body.prompt), messageList(typeof body.completion === "string" ? [{ role: "assistant", content: body.completion }] : body.completion), answerOf(body)),
    body.tokens ? section("Tokens", tokenView(body.tokens, query.get("shade"), setQuery(`/sample/${index}`, query, "shade"))) : null, await sampleTimes(index),
    element("details", {}, element("summary", {}, "everything recorded"), element("pre", {}, JSON.stringify({ versions: body.versions, ...body.info }, null, 1))));
}

function messageList(messages) {
  return element("div", { class: "messages" }, messages.map((message) => element("div", { class: `message ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "other"}` },
    element("b", {}, message.role ?? "?", message.name ? ` ${message.name}` : ""), longText(contentOf(message)),
    message.tool_calls ? element("pre", { class: "call" }, callsText(message.tool_calls)) : null)));
}

function callsText(calls) {
  if (!Array.isArray(calls)) return JSON.stringify(calls, null, 1);
  return calls.map((call) => {
    const [name, given] = [call?.function?.name ?? call?.name, call?.function?.arguments ?? call?.arguments];
    return typeof name === "string" ? `${name}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})` : JSON.stringify(call, null, 1);
  }).join("\n");
}

// Search in texts. They are packed in chunks that are unpacked one after another, so a search says how far it is and can
// be stopped; what it has found so far is shown.

function searchPage(query) {
  const wanted = (query.get("q") || "").toLowerCase();
  const test = (of, index, body) => wanted !== "" && body !== null && textsOf(body).toLowerCase().includes(wanted);
  return section("Search", searchedList(test, "recorded", (found) => `${found.length} samples with “${wanted}”`));
}

// The contents and tool calls of all messages of the prompt and the response.
function textsOf(body) {
  const response = typeof body.completion === "string" ? [body.completion] : contentsOf(body.completion, "content", "tool_calls");
  return [...contentsOf(body.prompt, "content", "tool_calls"), ...response].join("\n");
}

// The contents of the assistant's messages in the response.
function responseOf(body) {
  if (typeof body.completion === "string") return body.completion;
  return contentsOf(body.completion.filter((message) => message.role === "assistant"), "content").join("\n");
}

function contentsOf(messages, ...names) {
  const values = messages.flatMap((message) => names.map((name) => message[name])).filter(holdsText);
  return values.map((value) => (typeof value === "string" ? value : JSON.stringify(value)));
}

function holdsText(value) {
  return Array.isArray(value) ? value.length > 0 : value !== null && typeof value === "object" ? Object.keys(value).length > 0 : Boolean(value);
}

// The samples for which the test of (run, index, body) holds, as they are found; `words` says how many there are.
function searchedList(test, order, words) {
  const [of, asked] = [run, shownAddress];
  const told = element("span", { class: "hint", role: "status" });
  const stop = element("button", { onclick: () => { stopped = true; } }, "stop");
  const list = element("div", {});
  const box = element("div", { class: "search", "aria-busy": "true" }, element("p", { class: "controls" }, told, stop), list);
  let stopped = false;
  const found = [];
  const tell = (text) => told.replaceChildren(shownText(text));
  const search = async () => {
    let [searched, leftOut] = [0, 0];
    for (const [chunk, indices] of indicesByChunk(of)) {
      tell(`searching: ${searched} of ${of.size} samples, ${found.length} found`);
      const bodies = chunk < 0 ? [] : await unpackedOnce(`chunk-${of.number}-${chunk}`);
      if (asked !== shownAddress) return;
      if (stopped) break;
      found.push(...indices.filter((index) => test(of, index, bodies[of.columns.place[index]] ?? null)));
      searched += indices.length;
      if (chunk < 0) leftOut = indices.length;
    }
    const notes = [stopped && `stopped after ${searched} of ${of.size}`, leftOut && `texts of ${leftOut} samples were left out of this page`];
    tell([words(found), ...notes.filter(Boolean)].join("; "));
    inOrder(found, order, of);
    list.replaceChildren(growingList(found.length, (at) => sampleRow(found[at], of)));
  };
  search().catch((error) => { tell(""); list.replaceChildren(problemText(error)); }).finally(() => { stop.remove(); box.setAttribute("aria-busy", "false"); });
  return box;
}

// Samples by the chunk with their texts, in order; those without are of chunk -1.
function indicesByChunk(of) {
  const found = new Map();
  of.columns.chunk.forEach((chunk, index) => { if (!found.has(chunk)) found.set(chunk, []); found.get(chunk).push(index); });
  return [...found].sort(([a], [b]) => a - b);
}

// A part of the page, not kept where it was not unpacked before: a search goes through all of them.
function unpackedOnce(id) {
  return unpackedParts.get(id) ?? unpack(id);
}

// Timeline: a row per sample or worker, a bar per thing that took time, colours by kind and by version of the weights.

const KIND_COLOURS = { generate: "#3b7dd8", sampled: "#3b7dd8", scored: "#9bd3c1", tool: "#d97706", environment: "#0e9fbf", agent: "#0e9fbf", reward: "#0d9668", train: "#7c5cd6", call: "#3f4b5e", phase: "#5f7a8a", step: "#9aa6b5", weights: "#c43d6f" };
const MOST_BARS_IN_ROW = 400;

async function timelinePage(query) {
  const { rows, events } = await unpackedPart(`events-${run.number}`);
  const asked = query.get("step");
  const steps = events.length ? [...new Set(events.map((event) => event[5]).filter(isNumber))].sort((a, b) => a - b) : run.steps;
  const step = asked === "all" ? null : asked !== null && isNumber(Number(asked)) ? Number(asked) : steps.length ? steps.at(-1) : null;
  const controls = element("div", { class: "controls" }, choice("step", [...(events.length ? [["all", "all"]] : []), ...steps.map((number) => [number, number])], step ?? "all", setQuery("/timeline", query, "step")));
  if (!events.length) return section("Timeline", controls, await versionRows(step));
  const shown = events.filter((event) => step === null || event[5] === step || (event[5] === null && overlaps(event, events, step)));
  return section("Timeline", controls, barRows(rows, shown));
}

function overlaps(event, events, step) {
  const of = events.filter((other) => other[5] === step);
  const [begin, end] = [Math.min(...of.map((other) => other[3])), Math.max(...of.map((other) => other[3] + other[4]))];
  return event[3] < end && event[3] + event[4] > begin;
}

function barRows(names, events) {
  if (!events.length) return element("p", {}, "nothing was recorded in this step");
  let [begin, end] = [Infinity, -Infinity];
  const byRow = new Map();
  for (const event of events) {
    begin = Math.min(begin, event[3]);
    end = Math.max(end, event[3] + event[4]);
    if (!byRow.has(event[0])) byRow.set(event[0], []);
    byRow.get(event[0]).push(event);
  }
  const whole = end - begin || 1;
  const isSamples = ([, found]) => found.some((event) => event[7] !== null);
  const listed = [...[...byRow].filter((row) => !isSamples(row)), ...[...byRow].filter(isSamples)];
  const kinds = new Map(events.map((event) => [isNumber(event[6]) ? `${event[2]}, version ${event[6]}` : event[2], colourOf(event)]));
  const line = (at) => {
    const [row, found] = listed[at];
    const bars = found.length > MOST_BARS_IN_ROW ? [...found].sort((a, b) => b[4] - a[4]).slice(0, MOST_BARS_IN_ROW) : found;
    const sample = found.find((event) => event[7] !== null)?.[7];
    const busy = found.reduce((sum, event) => sum + event[4], 0);
    return element("div", { class: "track" }, sample === undefined ? element("span", { class: "name" }, names[row]) : element("a", { class: "name", href: sampleAddress(sample) }, names[row]),
      element("span", { class: "bars", role: "img", "aria-label": `${names[row]}: ${found.length} events, ${numberText(busy)} s` }, bars.sort((a, b) => b[4] - a[4]).map((event) => element("i", {
        title: `${event[1]}: ${numberText(event[4])} s from ${numberText(event[3] - begin)} s${isNumber(event[6]) ? `, weights of version ${event[6]}` : ""}`,
        style: { left: `${(100 * (event[3] - begin)) / whole}%`, width: `max(2px, ${(100 * event[4]) / whole}%)`, background: colourOf(event) } }))));
  };
  return element("div", {}, legend([...kinds].sort().slice(0, 24)), element("p", { class: "hint" }, `${numberText(whole)} s, ${listed.length} rows, ${events.length} events`), growingList(listed.length, line, 100));
}

// Sampling has a colour per version of the weights; every other kind its own.
function colourOf(event) {
  if (isNumber(event[6]) && ["generate", "sampled"].includes(event[2])) return versionColour(event[6]);
  return KIND_COLOURS[event[2]] || COLOURS[[...event[2]].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % COLOURS.length];
}

function versionColour(version) {
  return `hsl(${(205 + version * 47) % 360} 60% 52%)`;
}

// Without times: which tokens of each sample which weights sampled.
async function versionRows(step) {
  const indices = indicesWhere((index) => run.columns.step[index] === step).slice(0, 512);
  const bodies = await Promise.all(indices.map((index) => bodyOf(index)));
  const rows = indices.map((index, at) => ({ index, spans: spansOf(bodies[at], run.columns.length[index]) })).filter((row) => row.spans.length);
  if (!rows.length) return element("p", {}, "This run recorded no times, and no versions of weights for this step.");
  const longest = Math.max(...rows.map((row) => row.spans.at(-1)[1]));
  const versions = [...new Set(rows.flatMap((row) => row.spans.map(([, , version]) => version)))].sort((a, b) => a - b);
  return element("div", {}, element("p", { class: "hint" }, "This run recorded no times. Bars are sampled tokens, coloured by the version of the weights that sampled them."), legend(versions.map((version) => [`version ${version}`, versionColour(version)])),
    growingList(rows.length, (at) => element("div", { class: "track" }, element("a", { class: "name", href: sampleAddress(rows[at].index) }, `${run.prompts[run.columns.prompt[rows[at].index]]} sample ${run.columns.sample[rows[at].index]}`),
      element("span", { class: "bars" }, rows[at].spans.map(([from, until, version]) => element("i", { title: `tokens ${from} to ${until}: version ${version}`, style: { left: `${(100 * from) / longest}%`, width: `${(100 * (until - from)) / longest}%`, background: versionColour(version) } })))), 100));
}

// [from, until, version] in sampled tokens; `versions` counts from the beginning of the row, prompt included.
function spansOf(body, length) {
  if (!body?.versions?.length || !isNumber(length)) return [];
  const first = body.versions[0][0];
  return body.versions.map(([position, version], at) => [position - first, at + 1 < body.versions.length ? body.versions[at + 1][0] - first : Math.max(length, position - first), version]);
}

// The times of one sample, for its page.
async function sampleTimes(index) {
  if (!run.has_events) return null;
  const { rows, events } = await unpackedPart(`events-${run.number}`);
  const mine = events.filter((event) => event[7] === index);
  if (!mine.length) return null;
  const kinds = [...new Set(mine.map((event) => event[1]))];
  return section("Times", barRows(kinds, mine.map((event) => [kinds.indexOf(event[1]), ...event.slice(1, 7), null])));
}

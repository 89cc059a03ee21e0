"use strict";
// The runs: columns of every sample at hand, texts and tokens unpacked when they are looked at.

let about = null;
let runs = [];
let run = null;
const unpackedParts = new Map();

async function unpack(id) {
  const packed = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// A part of the page that is unpacked once.
function unpackedPart(id) {
  if (!unpackedParts.has(id)) unpackedParts.set(id, unpack(id));
  return unpackedParts.get(id);
}

async function loadRuns() {
  unpackedParts.clear();
  about = await unpack("about");
  runs = await Promise.all(Array.from({ length: about.count }, (_, number) => loadRun(number)));
  run = runs[0];
}

async function loadRun(number) {
  const loaded = await unpack(`head-${number}`);
  loaded.number = number;
  loaded.size = loaded.columns.step.length;
  loaded.groups = groupsOf(loaded);
  loaded.groupOf = new Int32Array(loaded.size);
  loaded.groups.forEach((group, at) => group.samples.forEach((index) => { loaded.groupOf[index] = at; }));
  loaded.steps = [...new Set(loaded.columns.step)].sort((a, b) => a - b);
  loaded.range = rangeOf(loaded.columns.score);
  return loaded;
}

function groupsOf(of) {
  const { step, lane, prompt, epoch } = of.columns;
  const found = new Map();
  for (let index = 0; index < of.size; index++) {
    const key = `${step[index]}/${lane[index]}/${epoch[index]}/${prompt[index]}`;
    if (!found.has(key)) found.set(key, { step: step[index], lane: lane[index], prompt: prompt[index], samples: [] });
    found.get(key).samples.push(index);
  }
  return [...found.values()];
}

// Lowest and highest number; [0, 1] where there is none.
function rangeOf(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? [0, 1] : [low, high];
}

// The texts and tokens of a sample; null where they were left out of the page.
async function bodyOf(index, of = run) {
  const chunk = of.columns.chunk[index];
  if (chunk < 0) return null;
  const body = (await unpackedPart(`chunk-${of.number}-${chunk}`))[of.columns.place[index]];
  const arrays = body.tokens?.arrays ?? {};
  for (const [name, values] of Object.entries(arrays)) if (Array.isArray(values)) arrays[name] = numbersOf(values[0]);
  return body;
}

// Numbers from base64 of the three upper bytes of float32: the highest byte of all, then the next, then the third.
function numbersOf(packed) {
  const planes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const count = planes.length / 3;
  const view = new DataView(new ArrayBuffer(4 * count));
  for (let at = 0; at < count; at++) for (let plane = 0; plane < 3; plane++) view.setUint8(4 * at + plane, planes[plane * count + at]);
  return Float32Array.from({ length: count }, (_, at) => view.getFloat32(4 * at));
}

function textOf(completion) {
  if (typeof completion === "string") return completion;
  return completion.filter((message) => message.role === "assistant").map((message) => contentOf(message)).join("\n");
}

function contentOf(message) {
  const content = message.content;
  if (typeof content === "string") return content;
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function meanOf(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function spreadOf(values) {
  if (!values.some(isNumber)) return 0;
  const [low, high] = rangeOf(values);
  return high - low;
}

// The values at these shares of the sorted list, such as 0.5 for the median.
function quantilesOf(values, shares) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  return known.length ? shares.map((share) => known[Math.round(share * (known.length - 1))]) : null;
}

// A column's values. Rewards belong to a sample: of its segments, only the first one has them here.
function valuesOf(name, indices, of = run) {
  const once = name === "score" || name.startsWith("reward.");
  return indices.map((index) => once && of.columns.segment[index] ? null : of.columns[name][index]);
}

function scoresOf(indices, of = run) {
  return valuesOf("score", indices, of);
}

function componentNames(of = run) {
  return Object.keys(of.columns).filter((name) => name.startsWith("reward."));
}

function indicesWhere(test) {
  const found = [];
  for (let index = 0; index < run.size; index++) if (test(index)) found.push(index);
  return found;
}

// Indices of the training samples of each step.
function trainedByStep(of = run) {
  const found = new Map(of.steps.map((step) => [step, []]));
  of.columns.step.forEach((step, index) => { if (of.columns.lane[index] === 0) found.get(step).push(index); });
  return new Map([...found].filter(([, indices]) => indices.length));
}

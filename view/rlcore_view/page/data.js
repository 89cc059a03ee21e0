"use strict";
// The run: columns of every sample at hand, texts and tokens unpacked when they are looked at.

let run = null;
const unpackedChunks = new Map();

async function unpack(id) {
  const packed = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function loadRun() {
  run = await unpack("head");
  run.size = run.columns.step.length;
  run.groups = groupsOf(run);
  run.groupOf = new Int32Array(run.size);
  run.groups.forEach((group, number) => group.samples.forEach((index) => { run.groupOf[index] = number; }));
  run.steps = [...new Set(run.columns.step)].sort((a, b) => a - b);
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

// The texts and tokens of a sample; null where they were left out of the page.
async function bodyOf(index) {
  const chunk = run.columns.chunk[index];
  if (chunk < 0) return null;
  if (!unpackedChunks.has(chunk)) unpackedChunks.set(chunk, unpack(`chunk-${chunk}`));
  return (await unpackedChunks.get(chunk))[run.columns.place[index]];
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
  const known = values.filter(isNumber);
  return known.length ? Math.max(...known) - Math.min(...known) : 0;
}

function scoresOf(indices) {
  return indices.map((index) => run.columns.score[index]);
}

function componentNames() {
  return Object.keys(run.columns).filter((name) => name.startsWith("reward."));
}

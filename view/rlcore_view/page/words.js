// Differences of two texts, word by word.

const MOST_WORDS = 1500;

function wordsOf(text) {
  const words = text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
  return words.length > MOST_WORDS ? [...words.slice(0, MOST_WORDS), words.slice(MOST_WORDS).join("")] : words;
}

// Stretches of `kind` same, new (of `after` alone) and gone (of `before` alone), in order.
function wordDifferences(before, after) {
  const [a, b] = [wordsOf(before), wordsOf(after)];
  let begin = 0;
  while (begin < a.length && begin < b.length && a[begin] === b[begin]) begin++;
  let end = 0;
  while (end < a.length - begin && end < b.length - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const [inA, inB] = [a.slice(begin, a.length - end), b.slice(begin, b.length - end)];
  const parts = [["same", b.slice(0, begin).join("")], ...middleDifferences(inA, inB), ["same", b.slice(b.length - end).join("")]];
  return joinedDifferences(parts.filter(([, text]) => text));
}

// Neighbours joined; white space between two differences belongs to both, and what is gone stands before what is new.
function joinedDifferences(parts) {
  const joined = [];
  let [gone, come] = ["", ""];
  const flush = () => { if (gone) joined.push(["gone", gone]); if (come) joined.push(["new", come]); [gone, come] = ["", ""]; };
  parts.forEach(([kind, text], at) => {
    const between = kind === "same" && (gone || come) && !text.trim() && at + 1 < parts.length && parts[at + 1][0] !== "same";
    if (kind === "gone" || between) gone += text;
    if (kind === "new" || between) come += text;
    if (kind !== "same" || between) return;
    flush();
    if (joined.at(-1)?.[0] === "same") joined.at(-1)[1] += text;
    else joined.push(["same", text]);
  });
  flush();
  return joined;
}

// By the longest common subsequence.
function middleDifferences(a, b) {
  const wide = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * wide);
  for (let row = a.length - 1; row >= 0; row--) {
    for (let column = b.length - 1; column >= 0; column--) {
      lengths[row * wide + column] = a[row] === b[column] ? lengths[(row + 1) * wide + column + 1] + 1 : Math.max(lengths[(row + 1) * wide + column], lengths[row * wide + column + 1]);
    }
  }
  const parts = [];
  let [row, column] = [0, 0];
  while (row < a.length || column < b.length) {
    if (row < a.length && column < b.length && a[row] === b[column]) { parts.push(["same", b[column]]); row++; column++; }
    else if (row < a.length && (column === b.length || lengths[(row + 1) * wide + column] >= lengths[row * wide + column + 1])) parts.push(["gone", a[row++]]);
    else parts.push(["new", b[column++]]);
  }
  return parts;
}

// The text `after`, with what it has and lacks compared with `before` marked.
function markedText(before, after) {
  const tags = { same: "span", new: "ins", gone: "del" };
  return element("pre", {}, wordDifferences(before.slice(0, LONGEST_TEXT), after.slice(0, LONGEST_TEXT)).map(([kind, text]) => element(tags[kind], { class: kind }, text)),
    after.length > LONGEST_TEXT ? `\n… ${after.length - LONGEST_TEXT} more characters` : null);
}

// Expressions over samples, such as `reward < 0.1 and truncated`: the language of `rlcore-view find` (query.py).

const FILTER_FIELDS = {
  reward: (of, index) => of.columns.score[index],
  score: (of, index) => of.columns.score[index],
  advantage: (of, index) => of.columns.advantage[index],
  length: (of, index) => of.columns.length[index],
  truncated: (of, index) => of.columns.truncated[index],
  failed: (of, index) => of.columns.status[index] === "failed",
  step: (of, index) => of.columns.step[index],
  lane: (of, index) => (of.columns.lane[index] ? "eval" : "train"),
  source: (of, index) => of.sources[of.columns.source[index]],
  prompt: (of, index) => of.prompts[of.columns.prompt[index]],
  sample: (of, index) => of.columns.sample[index],
  text: (of, index, body) => body && textsOf(body),
  response: (of, index, body) => body && responseOf(body),
};
const TEXT_FIELDS = new Set(["text", "response"]);
const COMPARISONS = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  in: (a, b) => b.includes(a), "not in": (a, b) => !b.includes(a),
};
const FILTER_WORD = /'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\p{L}_][\p{L}\p{N}_./-]*|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|[<>=!]=|[<>()-]|\S/gsu;
const DEEPEST_FILTER = 50;

// A test of (run, index, body), and `readsText`: whether it needs the body; throws an Error that names what is not known.
function filterOf(text) {
  const words = text.match(FILTER_WORD) || [];
  let [at, depth, readsText] = [0, 0, false];
  const take = (word) => words[at] === word && ++at > 0;
  const deeper = (parse) => {
    if (++depth > DEEPEST_FILTER) throw new Error(`it is nested more than ${DEEPEST_FILTER} deep`);
    const test = parse();
    depth--;
    return test;
  };
  const joined = (word, parse, join) => {
    const tests = [parse()];
    while (take(word)) tests.push(parse());
    return tests.length === 1 ? tests[0] : (...sample) => join(tests, (test) => test(...sample));
  };
  const either = () => joined("or", both, (tests, holds) => tests.some(holds));
  const both = () => joined("and", negation, (tests, holds) => tests.every(holds));
  function negation() {
    if (!take("not")) return comparison();
    const inner = deeper(negation);
    return (...sample) => !inner(...sample);
  }
  function comparison() {
    const values = [value()];
    const names = [];
    for (;;) {
      const name = words[at] === "not" && words[at + 1] === "in" ? "not in" : words[at];
      if (!Object.hasOwn(COMPARISONS, name ?? "")) break;
      at += name === "not in" ? 2 : 1;
      names.push(name);
      values.push(value());
    }
    if (!names.length) return values[0];
    return (...sample) => {
      const found = values.map((read) => read(...sample));
      return found.every((item) => item !== null && item !== undefined) && names.every((name, place) => compared(name, found[place], found[place + 1]));
    };
  }
  function value() {
    const word = words[at++];
    if (word === undefined) throw new Error("the expression ends too early");
    if (word === "(") {
      const inner = deeper(either);
      if (!take(")")) throw new Error("a closing bracket is missing");
      return inner;
    }
    if (word === "-") {
      const inner = deeper(value);
      return (...sample) => { const found = inner(...sample); return isNumber(found) ? -found : null; };
    }
    return constantOf(word) ?? fieldOf(word);
  }
  function fieldOf(word) {
    readsText ||= TEXT_FIELDS.has(word);
    if (Object.hasOwn(FILTER_FIELDS, word)) return FILTER_FIELDS[word];
    if (word.startsWith("reward.")) return (of, index) => of.columns[word]?.[index];
    throw new Error(`'${word}' is not known here; choose from ${Object.keys(FILTER_FIELDS).join(", ")}, reward.COMPONENT, numbers, texts in quotes, and, or, not`);
  }
  const test = either();
  if (at < words.length) throw new Error(`'${words[at]}' is not expected here`);
  return Object.assign((...sample) => Boolean(test(...sample)), { readsText });
}

function constantOf(word) {
  if (/^['"]./s.test(word)) {
    const text = word.slice(1, -1).replace(/\\(.)/gs, (_, letter) => ({ n: "\n", t: "\t" })[letter] ?? letter);
    return () => text;
  }
  if (/^[0-9]|^\../.test(word)) return () => Number(word);
  return null;
}

// Truth values count as 1 and 0.
function compared(name, left, right) {
  const texts = [left, right].map((item) => typeof item === "string");
  if (name.endsWith("in") && !(texts[0] && texts[1])) throw new Error(`'${name}' needs a text on both sides`);
  if (/^[<>]/.test(name) && texts[0] !== texts[1]) throw new Error("a number is compared with a text; compare numbers with numbers and texts with texts");
  const [a, b] = [left, right].map((item) => (typeof item === "boolean" ? Number(item) : item));
  return COMPARISONS[name](a, b);
}

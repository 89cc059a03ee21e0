// Expressions over samples, such as `reward < 0.1 and truncated`: the language of `rlcore-view find`, without `text`.

const FILTER_FIELDS = {
  reward: (of, index) => of.columns.score[index],
  score: (of, index) => of.columns.score[index],
  advantage: (of, index) => of.columns.advantage[index],
  length: (of, index) => of.columns.length[index],
  truncated: (of, index) => (of.columns.truncated[index] === null ? null : Boolean(of.columns.truncated[index])),
  failed: (of, index) => of.columns.status[index] === "failed",
  step: (of, index) => of.columns.step[index],
  lane: (of, index) => (of.columns.lane[index] ? "eval" : "train"),
  source: (of, index) => of.sources[of.columns.source[index]],
  prompt: (of, index) => of.prompts[of.columns.prompt[index]],
  sample: (of, index) => of.columns.sample[index],
};
const COMPARISONS = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  in: (a, b) => String(b).includes(String(a)), "not in": (a, b) => !String(b).includes(String(a)),
};

// A test of (run, index); throws an Error that names what is not known.
function filterOf(text) {
  const words = text.match(/'[^']*'|"[^"]*"|[A-Za-z_][\w.\/-]*|\d+(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+|[<>=!]=|[<>()-]|\S/g) || [];
  let at = 0;
  const take = (word) => words[at] === word && ++at > 0;
  function either() {
    const tests = [both()];
    while (take("or")) tests.push(both());
    return tests.length === 1 ? tests[0] : (of, index) => tests.some((test) => test(of, index));
  }
  function both() {
    const tests = [negation()];
    while (take("and")) tests.push(negation());
    return tests.length === 1 ? tests[0] : (of, index) => tests.every((test) => test(of, index));
  }
  function negation() {
    if (!take("not")) return comparison();
    const inner = negation();
    return (of, index) => !inner(of, index);
  }
  function comparison() {
    const values = [value()];
    const tests = [];
    for (;;) {
      const name = words[at] === "not" && words[at + 1] === "in" ? "not in" : words[at];
      if (!Object.hasOwn(COMPARISONS, name ?? "")) break;
      at += name === "not in" ? 2 : 1;
      tests.push(COMPARISONS[name]);
      values.push(value());
    }
    if (!tests.length) return values[0];
    return (of, index) => {
      const found = values.map((read) => read(of, index));
      return found.every((item) => item !== null && item !== undefined) && tests.every((test, place) => test(found[place], found[place + 1]));
    };
  }
  function value() {
    const word = words[at++];
    if (word === undefined) throw new Error("the expression ends too early");
    if (word === "(") {
      const inner = either();
      if (!take(")")) throw new Error("a closing bracket is missing");
      return inner;
    }
    if (word === "-") {
      const inner = value();
      return (of, index) => { const found = inner(of, index); return isNumber(found) ? -found : null; };
    }
    if (/^['"]./.test(word)) return () => word.slice(1, -1);
    if (/^[\d.]/.test(word)) return () => Number(word);
    if (Object.hasOwn(FILTER_FIELDS, word)) return FILTER_FIELDS[word];
    if (word.startsWith("reward.")) return (of, index) => of.columns[word]?.[index];
    throw new Error(`“${word}” is not known here; choose from ${Object.keys(FILTER_FIELDS).join(", ")}, reward.COMPONENT, numbers, texts in quotes, and, or, not`);
  }
  const test = either();
  if (at < words.length) throw new Error(`“${words[at]}” is not expected here`);
  return test;
}

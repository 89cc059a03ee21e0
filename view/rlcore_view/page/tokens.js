// The tokens of a response, shaded by what was recorded of them.

const MOST_TOKENS = 5000;

const SHADES = {
  advantage: { text: "advantage", signed: true, of: (arrays, at) => arrays.advantage?.[at] },
  logprob: { text: "log-prob when sampled", signed: false, of: (arrays, at) => negated(arrays.logprob?.[at]) },
  difference: { text: "log-prob of trainer − sampler", signed: true, of: (arrays, at) => minus(arrays.old_logprob?.[at], arrays.logprob?.[at]) },
  reference: { text: "log-prob of policy − reference", signed: true, of: (arrays, at) => minus(arrays.old_logprob?.[at] ?? arrays.logprob?.[at], arrays.reference_logprob?.[at]) },
  value: { text: "value of the critic", signed: true, of: (arrays, at) => arrays.value?.[at] },
  entropy: { text: "entropy", signed: false, of: (arrays, at) => arrays.entropy?.[at] },
};

function negated(value) {
  return isNumber(value) ? -value : null;
}

function minus(left, right) {
  return isNumber(left) && isNumber(right) ? left - right : null;
}

function tokenView(tokens, chosen, onChange) {
  const count = tokens.pieces.length;
  const known = Object.keys(SHADES).filter((name) => {
    for (let at = 0; at < count; at++) if (isNumber(SHADES[name].of(tokens.arrays, at))) return true;
    return false;
  });
  if (!known.length) return element("p", {}, "no tokens were recorded");
  const name = known.includes(chosen) ? chosen : known[0];
  const shade = SHADES[name];
  const values = tokens.pieces.map((_, at) => shade.of(tokens.arrays, at));
  const largest = values.reduce((most, value) => (isNumber(value) ? Math.max(most, Math.abs(value)) : most), 1e-9);
  const spanOf = (piece, at) => {
    const sampled = !tokens.sampled.length || tokens.sampled[at];
    const begins = at > 0 && tokens.turn.length && tokens.turn[at] !== tokens.turn[at - 1];
    const span = element("span", {
      class: sampled ? "token" : "token unsampled",
      title: tokenTitle(tokens, at, piece, sampled),
      style: sampled ? { background: shadeColour(values[at], largest, shade.signed) } : null,
    }, piece.replace(/\n/g, "↵\n") || "∅");
    return begins ? [element("hr", { class: "turn" }), span] : span;
  };
  const box = element("div", { class: "tokens" }, tokens.pieces.slice(0, MOST_TOKENS).map(spanOf));
  if (count > MOST_TOKENS) {
    const more = element("button", { onclick: () => { more.remove(); append(box, tokens.pieces.slice(MOST_TOKENS).map((piece, at) => spanOf(piece, at + MOST_TOKENS))); } }, `show ${count - MOST_TOKENS} more tokens`);
    box.append(more);
  }
  return element("div", {},
    element("div", { class: "controls" },
      choice("shade by", known.map((key) => [key, SHADES[key].text]), name, onChange),
      element("span", { class: "hint" }, largest <= 1e-9 ? "all are 0" : shade.signed ? `blue is positive, red negative; strongest ${numberText(largest)}` : `darkest ${numberText(largest)}${name === "logprob" ? " nats below certainty" : ""}`)),
    box);
}

function tokenTitle(tokens, at, piece, sampled) {
  const parts = Object.entries(tokens.arrays).map(([name, values]) => `${name} ${numberText(values[at], 4)}`);
  return `token ${at}: ${JSON.stringify(piece)}\n${sampled ? parts.join("\n") : "not sampled by the policy"}`;
}

function shadeColour(value, largest, signed) {
  if (!isNumber(value)) return "transparent";
  const strength = Math.min(1, Math.abs(value) / largest) * 0.55;
  const hue = signed ? (value >= 0 ? 212 : 0) : 30;
  return `hsl(${hue} 85% 50% / ${strength.toFixed(3)})`;
}

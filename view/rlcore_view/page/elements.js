// Elements of the page. Text of models and services reaches it as text only.

const LONGEST_TEXT = 50_000;

function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : shownText(child));
  }
}

// Characters that would not be seen, or would turn the line around, are shown by their code.
function shownText(value) {
  const hidden = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
  return document.createTextNode(String(value).replace(hidden, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  }));
}

// A text of a model; of a very long one the beginning and the end, and a button for the rest.
function longText(value) {
  const text = String(value);
  if (text.length <= LONGEST_TEXT) return element("pre", {}, text);
  const half = LONGEST_TEXT / 2;
  const box = element("pre", {}, text.slice(0, half));
  const all = element("button", { onclick: () => box.replaceChildren(shownText(text)) }, `show ${(text.length - LONGEST_TEXT).toLocaleString("en")} more characters`);
  append(box, ["\n", all, "\n", text.slice(-half)]);
  return box;
}

// Addresses: `#/groups` of the first run, `#1/groups` of the second.
function to(path, of = run) {
  return `#${of && of.number ? of.number : ""}${path}`;
}

function link(address, ...children) {
  return element("a", { href: address }, ...children);
}

function numberText(value, digits = 3) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

// As many digits as tell different numbers apart.
function numberTexts(values) {
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => numberText(value, digits));
    if (digits > 15 || new Set(texts).size === new Set(values).size) return texts;
  }
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function table(heads, rows, label) {
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, element("table", {},
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", { class: /^[–\d.e+-]+( %)?$/.test(cell) ? "number" : null }, cell)))))));
}

// A list that makes elements for what is on the screen, and more when its end is reached.
function growingList(count, makeItem, size = 50) {
  const list = element("div", { class: "list" });
  let shown = 0;
  const more = element("button", { class: "more", onclick: grow });
  function grow() {
    const until = Math.min(count, shown + size);
    for (; shown < until; shown++) list.insertBefore(makeItem(shown), more);
    more.textContent = `${count - shown} more`;
    more.hidden = shown >= count;
  }
  list.append(more);
  grow();
  new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting) && !more.hidden) grow(); }).observe(more);
  return list;
}

function choice(label, values, chosen, onChange) {
  return element("label", {}, label, " ", element("select", { onchange: (event) => onChange(event.target.value) },
    values.map(([value, text]) => element("option", { value, selected: String(value) === String(chosen) }, text))));
}

// An input that changes one part of the address when it is left or Enter is pressed.
function field(label, value, hint, onChange) {
  return element("label", {}, label, " ", element("input", { type: "search", value, placeholder: hint, size: Math.max(18, hint.length), onchange: (event) => onChange(event.target.value) }));
}

// Sets one part of the address's query and leaves the others.
function setQuery(path, query, name) {
  return (value) => {
    if (value === "") query.delete(name);
    else query.set(name, value);
    const rest = String(query);
    location.hash = to(rest ? `${path}?${rest}` : path);
  };
}

function sampleAddress(index, of = run) {
  return to(`/sample/${index}`, of);
}

function groupAddress(number, of = run) {
  return to(`/group/${number}`, of);
}

function scoreBadge(index, of = run) {
  const { score, status } = of.columns;
  if (status[index] !== "ok") return element("span", { class: "badge failed" }, status[index]);
  return element("span", { class: "badge", style: { background: scaleColour(score[index], of.range) } }, numberText(score[index]));
}

// From red over yellow to green, readable below text of both themes.
function scaleColour(value, [low, high]) {
  if (!isNumber(value)) return "transparent";
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return `hsl(${Math.round(share * 130)} 65% 50% / 0.4)`;
}

function sampleRow(index, of = run) {
  const { columns } = of;
  const flags = [columns.truncated[index] && "truncated", columns.lane[index] && "eval"].filter(Boolean).join(", ");
  return element("a", { class: "row", href: sampleAddress(index, of) }, element("span", { class: "step" }, `step ${columns.step[index]}`),
    element("span", { class: "name" }, of.prompts[columns.prompt[index]]), element("span", { class: "hint" }, flags),
    element("span", { class: "hint number" }, isNumber(columns.length[index]) ? `${columns.length[index]} tokens` : ""),
    element("span", { class: "hint number" }, isNumber(columns.advantage[index]) ? `advantage ${numberText(columns.advantage[index])}` : ""), scoreBadge(index, of));
}

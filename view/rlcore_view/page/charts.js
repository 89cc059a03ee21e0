// Curves with bands, bars and heat maps as SVG.

const COLOURS = ["#3b7dd8", "#d97706", "#0d9668", "#c43d6f", "#7c5cd6", "#5f7a8a", "#a3842a", "#2a9dab"];
const MOST_POINTS = 1200;

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined) made.setAttribute(name, String(value));
  append(made, children);
  return made;
}

function figure(title, ...children) {
  return element("figure", { class: "chart" }, element("figcaption", {}, title), ...children);
}

function ticksOf(low, high, wanted = 5) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

// At most MOST_POINTS points: of each stretch of steps the lowest and the highest.
function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const size = Math.ceil(points.length / (MOST_POINTS / 2));
  const kept = [];
  for (let begin = 0; begin < points.length; begin += size) {
    const part = points.slice(begin, begin + size);
    const low = part.reduce((best, point) => (point[1] < best[1] ? point : best));
    const high = part.reduce((best, point) => (point[1] > best[1] ? point : best));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function axes(xRange, yRange, width, height) {
  const [left, right, top, bottom] = [46, 10, 8, 22];
  const [[xLow, xHigh], [yLow, yHigh]] = [xRange, yRange];
  const x = (value) => left + ((value - xLow) / (xHigh - xLow || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((value - yLow) / (yHigh - yLow || 1)) * (height - top - bottom);
  const ticks = ticksOf(yLow, yHigh, 4);
  const texts = numberTexts(ticks);
  const lines = ticks.flatMap((tick, at) => [svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }),
    svg("text", { x: left - 5, y: y(tick) + 3, class: "tick end" }, texts[at])]);
  const names = ticksOf(xLow, xHigh, 5).filter(Number.isInteger).map((tick) => svg("text", { x: x(tick), y: height - 6, class: "tick middle" }, tick));
  return { x, y, drawn: [...lines, ...names], xOf: (at) => xLow + ((at - left) / (width - left - right)) * (xHigh - xLow) };
}

// `series`: [{name, points: [[x, y], ...], band: [[x, low, high], ...]}]
function lineChart(title, series, { width = 420, height = 190 } = {}) {
  const known = series.filter((line) => line.points.length);
  if (!known.length) return figure(title, element("p", { class: "hint" }, "nothing recorded"));
  const xRange = rangeOf(known.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]));
  let yRange = rangeOf(known.flatMap((line) => [...line.points.map((point) => point[1]), ...(line.band || []).flatMap((point) => point.slice(1))]));
  if (yRange[0] === yRange[1]) yRange = yRange[0] === 0 ? [0, 1] : [yRange[0] - Math.abs(yRange[0]) / 2, yRange[1] + Math.abs(yRange[1]) / 2];
  const { x, y, drawn, xOf } = axes(xRange, yRange, width, height);
  const label = `${title}: ${known.map((line) => `${line.name || title} from ${numberText(line.points[0][1])} to ${numberText(line.points.at(-1)[1])}`).join(", ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, drawn);
  known.forEach((line) => {
    line.colour ||= COLOURS[series.indexOf(line) % COLOURS.length];
    if (line.band?.length) {
      const ahead = line.band.map(([px, , high]) => `${x(px).toFixed(1)},${y(high).toFixed(1)}`);
      const back = line.band.map(([px, low]) => `${x(px).toFixed(1)},${y(low).toFixed(1)}`).reverse();
      picture.append(svg("polygon", { points: [...ahead, ...back].join(" "), fill: line.colour, opacity: 0.18 }));
    }
    const points = thinned(line.points);
    const path = points.map(([px, py], at) => `${at ? "L" : "M"}${x(px).toFixed(1)},${y(py).toFixed(1)}`).join("");
    picture.append(svg("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": 1.8, "stroke-linejoin": "round" }));
    if (points.length === 1) picture.append(svg("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 2.6, fill: line.colour }));
  });
  const read = element("output", { class: "hint" });
  const cursor = svg("line", { y1: 8, y2: height - 22, class: "cursor", visibility: "hidden" });
  picture.append(cursor);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = xOf(((event.clientX - box.left) / box.width) * width);
    const near = known.map((line) => line.points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best)));
    cursor.setAttribute("x1", x(near[0][0]));
    cursor.setAttribute("x2", x(near[0][0]));
    cursor.setAttribute("visibility", "visible");
    read.replaceChildren(shownText(`step ${near[0][0]}: ${near.map((point, at) => `${known.length > 1 ? `${known[at].name} ` : ""}${numberText(point[1], 4)}`).join(", ")}`));
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); read.replaceChildren(); });
  const made = figure(title, picture, known.length > 1 ? legend(known.map((line) => [line.name, line.colour])) : null);
  made.querySelector("figcaption").append(" ", read);
  return made;
}

function legend(entries) {
  return element("div", { class: "legend" }, entries.map(([name, colour]) => element("span", {}, element("i", { style: { background: colour } }), name)));
}

// Mean, and the band from the 10th to the 90th percentile, of a column over the steps.
function spreadChart(title, values) {
  const rows = [...values].map(([step, known]) => [step, meanOf(known), quantilesOf(known, [0.1, 0.9])]).filter(([, mean]) => isNumber(mean));
  return lineChart(title, [{ name: "mean", points: rows.map(([step, mean]) => [step, mean]), band: rows.map(([step, , [low, high]]) => [step, low, high]) }]);
}

// Stacked bars: `rows` are [x, [value of each name]]; values below 0 hang down.
function stackedChart(title, names, rows, { width = 420, height = 190 } = {}) {
  if (!rows.length) return figure(title, element("p", { class: "hint" }, "nothing recorded"));
  const size = Math.ceil(rows.length / 120);
  const bars = Array.from({ length: Math.ceil(rows.length / size) }, (_, at) => rows.slice(at * size, (at + 1) * size)).map((part) => [part[0][0], names.map((_, at) => meanOf(part.map((row) => row[1][at])) ?? 0), part.at(-1)[0]]);
  const sums = bars.flatMap(([, values]) => [values.reduce((sum, value) => sum + Math.min(0, value), 0), values.reduce((sum, value) => sum + Math.max(0, value), 0)]);
  const { x, y, drawn } = axes([bars[0][0], bars.at(-1)[2] + 1], rangeOf([0, ...sums]), width, height);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${names.join(", ")}` }, drawn);
  for (const [step, values, last] of bars) {
    let [up, down] = [0, 0];
    values.forEach((value, at) => {
      const from = value < 0 ? down : up;
      if (value < 0) down += value; else up += value;
      picture.append(svg("rect", { x: x(step), width: Math.max(1, x(last + 1) - x(step) - 0.6), y: y(Math.max(from, from + value)), height: Math.abs(y(from) - y(from + value)), fill: COLOURS[at % COLOURS.length] },
        svg("title", {}, `step ${step}: ${names[at]} ${numberText(value)}`)));
    });
  }
  return figure(title, picture, legend(names.map((name, at) => [name, COLOURS[at % COLOURS.length]])));
}

function histogram(title, values, { bins = 20, width = 420, height = 150 } = {}) {
  const known = values.filter(isNumber);
  if (!known.length) return figure(title, element("p", { class: "hint" }, "nothing recorded"));
  const [low, high] = rangeOf(known);
  const counts = new Array(high > low ? bins : 1).fill(0);
  for (const value of known) counts[Math.min(counts.length - 1, Math.floor(((value - low) / (high - low || 1)) * counts.length))]++;
  const most = Math.max(...counts);
  const bar = (width - 20) / counts.length;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${known.length} values from ${numberText(low)} to ${numberText(high)}` });
  counts.forEach((count, at) => {
    const tall = (count / most) * (height - 30);
    const from = low + ((high - low) / counts.length) * at;
    const wide = Math.min(bar - 1, 60);
    drawn.append(svg("rect", { x: 10 + at * bar, y: height - 20 - tall, width: Math.max(1, wide), height: tall, fill: COLOURS[0], rx: 1.5 },
      svg("title", {}, `${count} from ${numberText(from)}`)));
  });
  const [lowText, highText] = numberTexts([low, high]);
  drawn.append(svg("text", { x: 10, y: height - 5, class: "tick" }, lowText));
  if (high > low) drawn.append(svg("text", { x: width - 10, y: height - 5, class: "tick end" }, highText));
  return figure(`${title}: mean ${numberText(meanOf(known))} of ${known.length}`, drawn);
}

// Curves, bars and heat maps as SVG.

const COLOURS = ["#3b7dd8", "#d97706", "#0d9668", "#c43d6f", "#7c5cd6", "#5f7a8a"];

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, String(value));
  append(made, children);
  return made;
}

function ticksOf(low, high, wanted = 5) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

// `series`: [{name, points: [[x, y], ...]}]
function lineChart(title, series, { width = 420, height = 190 } = {}) {
  const all = series.flatMap((line) => line.points);
  if (!all.length) return element("figure", { class: "chart" }, element("figcaption", {}, title), "nothing recorded");
  const xs = all.map((point) => point[0]);
  const ys = all.map((point) => point[1]);
  const [left, right, top, bottom] = [46, 10, 8, 22];
  const [xLow, xHigh] = [Math.min(...xs), Math.max(...xs)];
  let [yLow, yHigh] = [Math.min(...ys), Math.max(...ys)];
  if (yLow === yHigh) [yLow, yHigh] = [yLow - 0.5, yHigh + 0.5];
  const x = (value) => left + ((value - xLow) / (xHigh - xLow || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((value - yLow) / (yHigh - yLow)) * (height - top - bottom);
  const label = `${title}: ${series.map((line) => `${line.name || title} from ${numberText(line.points[0]?.[1])} to ${numberText(line.points.at(-1)?.[1])}`).join(", ")}`;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticksOf(yLow, yHigh)) {
    drawn.append(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }));
    drawn.append(svg("text", { x: left - 5, y: y(tick) + 3, class: "tick end" }, numberText(tick)));
  }
  for (const tick of ticksOf(xLow, xHigh, 5)) {
    if (Number.isInteger(tick)) drawn.append(svg("text", { x: x(tick), y: height - 6, class: "tick middle" }, tick));
  }
  series.forEach((line, number) => {
    const path = line.points.map(([px, py], at) => `${at ? "L" : "M"}${x(px).toFixed(1)},${y(py).toFixed(1)}`).join("");
    const colour = COLOURS[number % COLOURS.length];
    drawn.append(svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.8 }));
    if (line.points.length <= 60) {
      for (const [px, py] of line.points) {
        drawn.append(svg("circle", { cx: x(px), cy: y(py), r: 2.4, fill: colour }, svg("title", {}, `step ${px}: ${numberText(py, 4)}`)));
      }
    }
  });
  const legend = series.length > 1 && element("div", { class: "legend" }, series.map((line, number) =>
    element("span", {}, element("i", { style: { background: COLOURS[number % COLOURS.length] } }), line.name)));
  return element("figure", { class: "chart" }, element("figcaption", {}, title), drawn, legend);
}

function histogram(title, values, { bins = 20, width = 420, height = 150 } = {}) {
  const known = values.filter(isNumber);
  if (!known.length) return element("figure", { class: "chart" }, element("figcaption", {}, title), "nothing recorded");
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const counts = new Array(high > low ? bins : 1).fill(0);
  for (const value of known) counts[Math.min(counts.length - 1, Math.floor(((value - low) / (high - low || 1)) * counts.length))]++;
  const most = Math.max(...counts);
  const bar = (width - 20) / counts.length;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${known.length} values from ${numberText(low)} to ${numberText(high)}` });
  counts.forEach((count, at) => {
    const tall = (count / most) * (height - 30);
    const from = low + ((high - low) / counts.length) * at;
    drawn.append(svg("rect", { x: 10 + at * bar, y: height - 20 - tall, width: Math.max(1, bar - 1), height: tall, fill: COLOURS[0] },
      svg("title", {}, `${count} from ${numberText(from)}`)));
  });
  drawn.append(svg("text", { x: 10, y: height - 5, class: "tick" }, numberText(low)));
  drawn.append(svg("text", { x: width - 10, y: height - 5, class: "tick end" }, numberText(high)));
  return element("figure", { class: "chart" }, element("figcaption", {}, title), drawn);
}

// Rows of prompts, columns of steps; a cell is the mean score of one group.
function heatMap(rows, steps) {
  const cell = 14;
  const width = steps.length * cell;
  const range = scoreRange();
  return element("div", { class: "scroll" }, element("table", { class: "heat" },
    element("tbody", {}, rows.map((row) => {
      const drawn = svg("svg", { width, height: cell, role: "img", "aria-label": `${row.name}: ${row.cells.size} groups` });
      row.cells.forEach((group, step) => {
        const mean = meanOf(scoresOf(run.groups[group].samples));
        const box = svg("rect", { x: steps.indexOf(step) * cell, y: 0, width: cell - 1, height: cell - 1, fill: scaleColour(mean, range), class: "cell" },
          svg("title", {}, `step ${step}: mean reward ${numberText(mean)}`));
        box.addEventListener("click", () => { location.hash = groupAddress(group); });
        drawn.append(box);
      });
      return element("tr", {}, element("td", { class: "name" }, row.name), element("td", {}, row.kind), element("td", {}, drawn));
    }))));
}

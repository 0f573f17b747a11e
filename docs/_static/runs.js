// The run browser: draws the runs of RUNS (runs_data.js, which the site's build writes) whose
// methods and seeds are ticked, and a visitor's own log beside them. The choice stands in the address.
"use strict";
(() => {
  const START = ["grpo", "grpo_no_kl", "branch_strong"];
  /** Logs of a visitor: {name, log}, read here and sent nowhere. */
  const OWN = [];
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 360, HEIGHT = 230;
  const LEFT = 48, RIGHT = 350, TOP = 8, BOTTOM = 192;

  /** Append a new element, which is one of SVG inside of SVG. */
  function add(parent, name, attributes = {}, text = "") {
    const inside = name === "svg" || parent.namespaceURI === SVG;
    const made = inside ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(text);
    return parent.appendChild(made);
  }

  const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

  // --- choosing -----------------------------------------------------------------------------

  function tick(parent, text, on, method) {
    const label = add(parent, "label");
    const box = add(label, "input", { type: "checkbox" });
    box.checked = on;
    if (method) swatch(label, method);
    label.append(text);
    return box;
  }

  /** A short line in the look of a method. */
  function swatch(parent, method) {
    const svg = add(parent, "svg", { class: "swatch", viewBox: "0 0 30 10" });
    add(svg, "path", { d: "M1,5H29", ...look(method, 2.5) });
    mark(svg, method, 15, 5);
  }

  function mark(svg, method, x, y) {
    const place = { transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` };
    add(svg, "path", { d: method.marker, fill: method.colour, ...place });
  }

  function look(method, width) {
    const dash = { "stroke-dasharray": method.dash };
    return { fill: "none", stroke: method.colour, "stroke-width": width, ...dash };
  }

  /** The choice as the address has it: "grpo,branch_strong:3407+3408"; "none" where it is empty. */
  function address() {
    const parts = RUNS.methods.filter((method) => method.box.checked).map((method) => {
      const seeds = method.runs.filter((run) => run.box.checked).map((run) => run.seed);
      return method.key + (seeds.length < method.runs.length ? `:${seeds.join("+")}` : "");
    });
    return parts.join(",") || "none";
  }

  /** Tick what an address says. An empty one is the choice at first. */
  function choose(text) {
    const parts = text.replace(/^#/, "").replaceAll("%2B", "+").replaceAll("%2C", ",").split(",");
    const found = new Map(parts.map((part) => part.split(":")));
    const known = RUNS.methods.some(({ key }) => found.has(key)) || found.has("none");
    for (const method of RUNS.methods) {
      method.box.checked = known ? found.has(method.key) : START.includes(method.key);
      if (method.box.checked) method.box.closest(".family").open = true;
      const seeds = found.get(method.key)?.split("+");
      for (const run of method.runs) run.box.checked = !seeds || seeds.includes(String(run.seed));
    }
  }

  /** Boxes for methods by family, and for the seeds of each method behind a fold. */
  function chooser(parent) {
    for (const family of new Set(RUNS.methods.map((method) => method.family))) {
      const methods = RUNS.methods.filter((method) => method.family === family);
      const fold = add(parent, "details", { class: "family" });
      add(fold, "summary", {}, `${family} (${many(methods.length, "method")})`);
      for (const method of methods) {
        const row = add(fold, "div", { class: "method" });
        method.box = tick(row, method.label, false, method);
        const seeds = add(row, "details");
        add(seeds, "summary", {}, many(method.runs.length, "seed"));
        for (const run of method.runs) run.box = tick(seeds, `${run.seed} (${run.profile})`, true);
      }
    }
  }

  // --- a visitor's own log ------------------------------------------------------------------

  /** A trainer_state.json as the columns of a log. Throws where it is none. */
  function readLog(text) {
    const rows = JSON.parse(text)?.log_history;
    if (!Array.isArray(rows)) throw Error("it has no log_history");
    const logged = rows.filter((row) => Number.isFinite(row.step) && Number.isFinite(row.reward));
    if (!logged.length) throw Error("no row of its log_history has a step and a reward");
    const column = (...names) => logged.map((row) => names.map((name) => row[name]).find(Number.isFinite) ?? null);
    return { step: column("step"), reward: column("reward"), entropy: column("entropy"), kl_ref: column("kl_ref", "kl") };
  }

  async function take(files, said, shown) {
    const refused = [];
    for (const file of files) {
      try {
        OWN.push({ name: file.name, log: readLog(await file.text()) });
      } catch (error) {
        refused.push(`${file.name} cannot be shown: ${error.message}.`);
      }
    }
    said.textContent = refused.join(" ");
    shown();
  }

  // --- drawing ------------------------------------------------------------------------------

  /** [step, value] of a run for a panel, where it has a value. */
  function points(run, panel) {
    const { step, [panel.column]: values } = run[panel.part] ?? { step: [] };
    return step.map((x, i) => [x, values[i]]).filter(([, y]) => y !== null);
  }

  /** The mean of several lines at the steps that all of them have. */
  function mean(lines) {
    const at = new Map();
    for (const [x, y] of lines.flat()) at.set(x, [...(at.get(x) ?? []), y]);
    return [...at].filter(([, ys]) => ys.length === lines.length)
      .map(([x, ys]) => [x, ys.reduce((sum, y) => sum + y, 0) / ys.length]);
  }

  /** Round numbers between two bounds, about five. */
  function ticks(low, high) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
    return found;
  }

  function axes(svg, xs, ys, x, y) {
    const grid = { stroke: "#ddd", "stroke-width": 0.7 };
    for (const value of ticks(...xs)) {
      add(svg, "path", { d: `M${x(value)},${TOP}V${BOTTOM}`, ...grid });
      add(svg, "text", { x: x(value), y: BOTTOM + 15, "text-anchor": "middle" }, value);
    }
    for (const value of ticks(...ys)) {
      add(svg, "path", { d: `M${LEFT},${y(value)}H${RIGHT}`, ...grid });
      const text = String(+value.toPrecision(3));
      add(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, text);
    }
    add(svg, "path", { d: `M${LEFT},${TOP}V${BOTTOM}H${RIGHT}`, fill: "none", stroke: "#262626" });
    add(svg, "text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 32, "text-anchor": "middle" }, "step");
  }

  /** One plot: a thin line for each run, and a thick one for the mean of a method. */
  function plot(parent, panel, chosen) {
    const figure = add(parent, "figure");
    add(figure, "figcaption", {}, panel.title);
    const drawn = chosen.map(({ method, runs }) => {
      const lines = runs.map((run) => ({ run, line: points(run, panel) }));
      return { method, lines: lines.filter(({ line }) => line.length) };
    }).filter(({ lines }) => lines.length);
    const all = drawn.flatMap(({ lines }) => lines.flatMap(({ line }) => line));
    if (!all.length) return add(figure, "p", {}, "These runs have no such values.");
    const svg = add(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    svg.setAttribute("aria-label", `${panel.title} along training`);
    const values = all.map(([, value]) => value);
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low) * 0.05 || 0.01;
    const xs = [0, Math.max(1, ...all.map(([step]) => step))], ys = [low - room, high + room];
    const x = (value) => LEFT + (value / xs[1]) * (RIGHT - LEFT);
    const y = (value) => BOTTOM - ((value - ys[0]) / (ys[1] - ys[0])) * (BOTTOM - TOP);
    axes(svg, xs, ys, x, y);
    const path = (line, method, width, opacity, name) => {
      const d = `M${line.map(([step, v]) => `${x(step).toFixed(1)},${y(v).toFixed(1)}`).join("L")}`;
      add(add(svg, "path", { d, opacity, ...look(method, width) }), "title", {}, name);
    };
    for (const { method, lines } of drawn)
      for (const { run, line } of lines)
        path(line, { ...method, dash: "none" }, 0.8, 0.35, `${method.label}, seed ${run.seed}`);
    for (const { method, lines } of drawn) {
      const middle = mean(lines.map(({ line }) => line));
      if (!middle.length) continue;
      path(middle, method, 2, 1, `${method.label}, mean of ${many(lines.length, "seed")}`);
      const apart = Math.ceil(middle.length / 5);
      middle.forEach(([step, v], i) => i % apart || mark(svg, method, x(step), y(v)));
    }
  }

  /** What a method's runs were trained with, the command of one of them, and the notebook. */
  function explain(parent, chosen) {
    const table = add(add(parent, "div", { class: "wide" }), "table");
    const head = add(add(table, "thead"), "tr");
    for (const name of ["method", "settings", "command", "notebook"]) add(head, "th", { scope: "col" }, name);
    const body = add(table, "tbody");
    for (const { method, runs } of chosen) {
      const row = add(body, "tr");
      add(row, "td", {}, method.label);
      add(row, "td", {}, method.settings);
      const name = `${method.key.split("/").at(-1)}-s${runs[0].seed}`;
      const run = `sage-companion stage rl --profile ${runs[0].profile} --run ${name}`;
      add(add(row, "td"), "code", {}, run);
      add(add(row, "td"), "a", { href: `notebooks/${method.notebook}.html` }, method.notebook.slice(0, 2));
    }
  }

  function draw() {
    for (const part of [legend, plots, table]) part.replaceChildren();
    const chosen = RUNS.methods.filter((method) => method.box.checked)
      .map((method) => ({ method, runs: method.runs.filter((run) => run.box.checked) }))
      .filter(({ runs }) => runs.length);
    if (!chosen.length && !OWN.length) add(legend, "span", {}, "Choose a method.");
    for (const { method, runs } of chosen) {
      const item = add(legend, "span");
      swatch(item, method);
      item.append(`${method.label} (${many(runs.length, "seed")})`);
    }
    const own = OWN.map(({ name, log }) => ({ method: { label: name, ...MINE }, runs: [{ seed: "of yours", log }] }));
    for (const { method } of own) {
      const item = add(legend, "span");
      swatch(item, method);
      item.append(method.label);
    }
    const all = [...chosen, ...own];
    if (all.length) for (const panel of RUNS.panels) plot(plots, panel, all);
    if (chosen.length) explain(table, chosen);
  }

  /** The look of a visitor's log. */
  const MINE = { colour: "#000", dash: "none", marker: "M-4,3L4,3L0,-4Z" };

  const root = document.getElementById("runs");
  const choice = add(root, "div", { class: "choice" });
  chooser(choice);
  const none = add(root, "button", { type: "button" }, "Clear the choice");
  const label = add(root, "label", { class: "own" }, "Your own trainer_state.json beside ours (drop it here; it stays in this browser): ");
  const file = add(label, "input", { type: "file", accept: ".json", multiple: "" });
  const said = add(root, "p", { role: "status" });
  const legend = add(root, "div", { class: "legend", "aria-live": "polite" });
  const plots = add(root, "div", { class: "plots" });
  const table = add(root, "div");

  const changed = () => {
    history.replaceState(null, "", `#${address()}`);
    draw();
  };
  none.addEventListener("click", () => {
    for (const method of RUNS.methods) method.box.checked = false;
    OWN.length = 0;
    changed();
  });
  choice.addEventListener("change", changed);
  file.addEventListener("change", () => take(file.files, said, draw));
  root.addEventListener("dragover", (event) => event.preventDefault());
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files, said, draw);
  });
  addEventListener("hashchange", () => { choose(location.hash); draw(); });
  choose(location.hash);
  draw();
  globalThis.runs = { readLog, take: (files) => take(files, said, draw) };
})();

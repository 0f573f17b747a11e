// pass@k of counts that a visitor pastes or drops. The text is read here, and goes nowhere. The
// numbers are those of `sage-companion pass-at-k`: sage_lib/evaluation/metrics.py has the estimate
// and the interval, sample_lines.py the formats.
"use strict";
((root) => {
  const RESAMPLES = 10000;
  const MOST_POINTS = 40;
  const EXAMPLE = "n, c\n64, 40\n64, 12\n64, 3\n64, 1\n64, 0\n64, 0\n64, 5\n64, 28\n64, 64\n64, 0\n64, 2\n64, 9\n";

  // --- reading ------------------------------------------------------------------------------

  const isCount = (value) => Number.isInteger(value);

  function checked(n, c) {
    if (!isCount(n) || !isCount(c)) throw Error("has a count that is not a whole number");
    if (!(n >= 1 && c >= 0 && c <= n))
      throw Error(`has c = ${c} and n = ${n}: 0 <= c <= n and n >= 1 are needed`);
    return [n, c];
  }

  const cells = (line) => line.split(/[,;\t]/).map((cell) => cell.trim().replace(/^"(.*)"$/, "$1"));

  /** A line of numbers: n, c; or what the line above all others names. */
  function ofCells(line, names) {
    const found = cells(line);
    if (found.length !== names.length)
      throw Error(`has ${found.length} fields and not ${names.length}: ${names.join(", ")}`);
    const [n, c] = ["n", "c"].map((name) => found[names.indexOf(name)]);
    if (n === "" || c === "") throw Error("has no n or no c");
    const of = (name) => found[names.indexOf(name)];
    return { problem: names.includes("id") ? of("id") : null, counts: checked(+n, +c) };
  }

  /** A JSON line: counts (id, c, n), or a sample (problem, id or prompt, and correct). */
  function ofJson(line) {
    let row;
    try { row = JSON.parse(line); } catch (error) { throw Error(`is not JSON (${error.message})`); }
    if (row === null || typeof row !== "object" || Array.isArray(row))
      throw Error("is not an object with fields");
    const seed = row.seed ?? null;
    if (["id", "c", "n"].every((name) => name in row))
      return { problem: String(row.id), counts: checked(row.n, row.c), seed };
    const key = ["problem", "id", "prompt"].find((name) => name in row);
    if (key === undefined) throw Error("has no problem, id or prompt");
    if (!("correct" in row)) throw Error("has no correct");
    if (![0, 1, true, false].includes(row.correct))
      throw Error(`has ${JSON.stringify(row.correct)} for correct, not 0 or 1`);
    if (row[key] === null || row[key] === "" || typeof row[key] === "boolean")
      throw Error(`has a ${key} that is no text and no number`);
    const name = typeof row[key] === "object" ? JSON.stringify(row[key]) : row[key];
    const problem = "dataset" in row ? `${row.dataset}/${name}` : String(name);
    const once = row.number ?? null;
    return { problem, counts: [1, Number(row.correct)], seed, sample: true, once };
  }

  /** Counts by problem, in the order of the text, and the lines that cannot be read. */
  function read(text) {
    const counts = new Map(), unreadable = [], seen = new Map();
    let names = null, seed, json = null, lines = 0;
    text.replace(/^\uFEFF/, "").split(/\r\n|\n|\r/).forEach((line, at) => {
      if (!line.trim()) return;
      json ??= line.trim().startsWith("{");
      if (!json && names === null) {
        const head = cells(line).map((cell) => cell.toLowerCase());
        const named = head.includes("n") && head.includes("c");
        names = named ? head : ["n", "c"];
        if (named) return;
      }
      lines += 1;
      try {
        const row = json ? ofJson(line) : ofCells(line, names);
        if (seed === undefined) seed = row.seed;
        if (row.seed !== seed) throw Error(`is of another training seed, ${row.seed}: show one seed at a time`);
        const problem = row.problem ?? `line ${at + 1}`;
        if (!row.sample || row.once !== null) {
          const key = JSON.stringify([problem, row.once ?? null]);
          if (seen.has(key)) throw Error(`repeats what line ${seen.get(key)} has of ${problem}`);
          seen.set(key, at + 1);
        }
        const [n, c] = counts.get(problem) ?? [0, 0];
        counts.set(problem, [n + row.counts[0], c + row.counts[1]]);
      } catch (error) {
        unreadable.push([at + 1, error.message]);
      }
    });
    return { counts: [...counts].map(([problem, [n, c]]) => ({ problem, n, c })), unreadable, lines };
  }

  // --- the numbers --------------------------------------------------------------------------

  /** Unbiased pass@k of a problem, 1 - C(n - c, k) / C(n, k), as a product. */
  function passAtK(n, c, k) {
    let wrong = 1;
    for (let drawn = 0; drawn < k; drawn++) wrong *= Math.max(0, n - c - drawn) / (n - drawn);
    return 1 - wrong;
  }

  /** Each k up to 40; beyond, powers of 2 and steps of a twelfth of a factor of ten between them. */
  function sizes(fewest) {
    if (fewest <= MOST_POINTS) return Array.from({ length: fewest }, (_, i) => i + 1);
    const found = new Set([fewest]);
    for (let k = 1; k <= fewest; k *= 2) found.add(k);
    for (let i = 0; 10 ** (i / 12) <= fewest; i++) found.add(Math.round(10 ** (i / 12)));
    return [...found].sort((a, b) => a - b);
  }

  /** Random numbers in (0, 1), the same each time (mulberry32). */
  function generator(seed) {
    let state = seed;
    return () => {
      state = (state + 0x6d2b79f5) | 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return (((t ^ (t >>> 14)) >>> 0) + 0.5) / 4294967296;
    };
  }

  /** The sum of so many exponential numbers (Marsaglia and Tsang 2000). */
  function gamma(count, random) {
    if (count === 1) return -Math.log(random());
    const d = count - 1 / 3, scale = 1 / Math.sqrt(9 * d);
    for (;;) {
      const normal = Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
      const v = (1 + scale * normal) ** 3;
      if (v > 0 && Math.log(random()) < normal ** 2 / 2 + d - d * v + d * Math.log(v)) return d * v;
    }
  }

  function quantile(sorted, share) {
    const at = share * (sorted.length - 1), below = Math.floor(at);
    const above = Math.min(below + 1, sorted.length - 1);
    return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
  }

  /** Mean pass@k over problems with a 95 % interval, at each of `ks`. Problems with the same counts
   * have the same curve, and one weight together. */
  function curve(problems, ks) {
    const alike = new Map();
    for (const { n, c } of problems) alike.set(`${n},${c}`, (alike.get(`${n},${c}`) ?? 0) + 1);
    const repeats = [...alike.values()];
    const values = [...alike.keys()].map((key) => {
      const [n, c] = key.split(",").map(Number);
      return ks.map((k) => passAtK(n, c, k));
    });
    const lows = ks.map(() => new Float64Array(RESAMPLES)), highs = ks.map(() => new Float64Array(RESAMPLES));
    const random = generator(0);
    for (let draw = 0; draw < RESAMPLES; draw++) {
      const weights = repeats.map((count) => gamma(count, random)), unseen = gamma(1, random);
      const total = weights.reduce((sum, weight) => sum + weight, unseen);
      for (let at = 0; at < ks.length; at++) {
        let found = 0;
        for (let i = 0; i < weights.length; i++) found += weights[i] * values[i][at];
        lows[at][draw] = found / total;
        highs[at][draw] = (found + unseen) / total;
      }
    }
    return ks.map((k, at) => {
      const found = values.reduce((sum, row, i) => sum + repeats[i] * row[at], 0);
      const [low, high] = [[lows[at], 0.025], [highs[at], 0.975]].map(([all, share]) => quantile(all.sort(), share));
      return { k, mean: found / problems.length, low, high };
    });
  }

  // --- the page -----------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 520, HEIGHT = 300, LEFT = 44, RIGHT = 510, TOP = 10, BOTTOM = 258;

  function add(parent, name, attributes = {}, text = "") {
    const inside = name === "svg" || parent.namespaceURI === SVG;
    const made = inside ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(text);
    return parent.appendChild(made);
  }

  const isPower = (k) => Number.isInteger(Math.log2(k));

  function picture(parent, points) {
    const most = Math.max(2, points.at(-1).k);
    const x = (k) => LEFT + (Math.log(k) / Math.log(most)) * (RIGHT - LEFT);
    const y = (p) => BOTTOM - p * (BOTTOM - TOP);
    const svg = add(parent, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    svg.setAttribute("aria-label", "Mean pass@k over k, with its 95 % interval. The table has the numbers.");
    const grid = { stroke: "#ddd", "stroke-width": 0.7 };
    for (const p of [0, 0.25, 0.5, 0.75, 1]) {
      add(svg, "path", { d: `M${LEFT},${y(p)}H${RIGHT}`, ...grid });
      add(svg, "text", { x: LEFT - 6, y: y(p) + 4, "text-anchor": "end" }, p);
    }
    const apart = Math.ceil(Math.log2(most) / 8);
    for (let power = 0; 2 ** power <= most; power += apart)
      add(svg, "text", { x: x(2 ** power), y: BOTTOM + 16, "text-anchor": "middle" }, 2 ** power);
    add(svg, "text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 34, "text-anchor": "middle" }, "k");
    const line = (name, all) => all.map((one) => `${x(one.k).toFixed(1)},${y(one[name]).toFixed(1)}`).join("L");
    const band = `M${line("low", points)}L${line("high", points.toReversed())}Z`;
    add(svg, "path", { d: band, fill: "#0173b2", opacity: 0.2 });
    add(svg, "path", { d: `M${line("mean", points)}`, fill: "none", stroke: "#0173b2", "stroke-width": 2 });
    add(svg, "path", { d: `M${LEFT},${TOP}V${BOTTOM}H${RIGHT}`, fill: "none", stroke: "#262626" });
  }

  function table(parent, points) {
    const made = add(add(parent, "div", { class: "wide" }), "table");
    const head = add(add(made, "thead"), "tr");
    for (const name of ["k", "pass@k", "low", "high"]) add(head, "th", { scope: "col" }, name);
    const body = add(made, "tbody");
    for (const one of points.filter(({ k }, i) => isPower(k) || i === points.length - 1)) {
      const row = add(body, "tr");
      for (const text of [one.k, ...["mean", "low", "high"].map((name) => one[name].toFixed(4))])
        add(row, "td", {}, text);
    }
  }

  const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

  function mount(element) {
    element.replaceChildren();
    const label = add(element, "label", {}, "Counts, or one sample a line");
    const text = add(label, "textarea", { rows: 8, spellcheck: "false", placeholder: "n, c" });
    const buttons = add(element, "div", { class: "buttons" });
    const choose = add(buttons, "label", { class: "file" }, "or a file: ");
    const file = add(choose, "input", { type: "file", accept: ".csv,.tsv,.txt,.jsonl,.json" });
    const example = add(buttons, "button", { type: "button" }, "Show an example");
    const said = add(element, "p", { role: "status" });
    const lost = add(element, "ul", { class: "lost" });
    const figure = add(element, "figure"), numbers = add(element, "div");

    function show() {
      for (const part of [said, lost, figure, numbers]) part.replaceChildren();
      const { counts, unreadable, lines } = read(text.value);
      for (const [line, why] of unreadable.slice(0, 20)) add(lost, "li", {}, `Line ${line} ${why}.`);
      const more = unreadable.length > 20 ? ` The first 20 of ${unreadable.length} are named.` : "";
      const left = unreadable.length ? ` ${many(unreadable.length, "line")} left out.${more}` : "";
      if (!lines) return;
      if (!counts.length) return said.append(`No line can be read.${left}`);
      const fewest = Math.min(...counts.map(({ n }) => n));
      const few = counts.length < 30 ? " Few problems make wide intervals." : "";
      said.append(`${many(counts.length, "problem")}, at least ${many(fewest, "sample")} of each.${few}${left}`);
      const points = curve(counts, sizes(fewest));
      picture(figure, points);
      table(numbers, points);
    }

    let wait = null;
    text.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(show, 400); });
    const take = async (chosen) => { text.value = await chosen.text(); show(); };
    file.addEventListener("change", () => file.files[0] && take(file.files[0]));
    element.addEventListener("dragover", (event) => event.preventDefault());
    element.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return; // a text that is dropped is put in the field
      event.preventDefault();
      take(event.dataTransfer.files[0]);
    });
    example.addEventListener("click", () => { text.value = EXAMPLE; show(); });
  }

  root.passk = { read, passAtK, sizes, curve, mount };
  const place = root.document?.getElementById("passk");
  if (place) mount(place);
})(globalThis);

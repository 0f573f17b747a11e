// The optimum of eq. 4, live: pi(y) proportional to q(y) pi_ref(y) exp(r(y)/beta), with r 1 on right
// completions and 0 on wrong ones. sage_lib/report/tilt.py puts this file into notebooks, and
// tools/build_site.py on the site. It draws in each element that has the attribute data-tilt.
"use strict";
((root) => {
  const BETA = { from: 3, to: 0.05 };
  const SECONDS = 8;
  /** Beta at a place of its slider, 0 to 100: equal steps are equal factors. At 34 it is 0.2. */
  const betaAt = (place) => +(BETA.to * (BETA.from / BETA.to) ** (place / 100)).toPrecision(2);
  const PLACES = [0, 100, 1], BEGIN = 34;
  const START = [
    { name: "A", right: true, note: "the common way", reference: 0.0008, q: 1 },
    { name: "B", right: true, note: "the rare way", reference: 0.0002, q: 1 },
    { name: "C", right: false, note: "", reference: 0.55, q: 1 },
    { name: "D", right: false, note: "", reference: 0.3, q: 1 },
    { name: "E", right: false, note: "", reference: 0.149, q: 1 },
  ];

  // --- the formulas -------------------------------------------------------------------------

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  /** Eq. 4 as a list of probabilities; with q = 1 eq. 2. */
  function optimum(reference, reward, beta, q) {
    const logs = reference.map((p, i) => Math.log(q[i]) + Math.log(p) + reward[i] / beta);
    const most = Math.max(...logs);
    const weights = logs.map((value) => Math.exp(value - most));
    return weights.map((weight) => weight / sum(weights));
  }

  /** The probability of a right completion: pass@1. */
  const success = (policy, reward) => sum(policy.filter((_, i) => reward[i] === 1));

  /** The probability that one of k draws is right: 1 - (1 - p)^k. */
  const passAt = (p, k) => (p >= 1 ? 1 : -Math.expm1(k * Math.log1p(-p)));

  /** E[q | right] / E[q | wrong] under the reference: what a guide multiplies the odds by. */
  function rho(reference, reward, q) {
    const mean = (right) => {
      const side = reference.map((p, i) => ((reward[i] === 1) === right ? p : 0));
      return sum(side.map((p, i) => p * q[i])) / sum(side);
    };
    return mean(true) / mean(false);
  }

  // --- the picture --------------------------------------------------------------------------

  const STYLE = `
.tilt { display: grid; gap: 0.6rem; max-width: 46rem; margin: 1rem 0; font-size: 0.9rem; }
.tilt * { box-sizing: border-box; }
.tilt fieldset { border: 0; margin: 0; padding: 0; display: grid; gap: 0.4rem; min-width: 0; }
.tilt legend { padding: 0; margin-bottom: 0.3rem; }
.tilt-row { display: grid; grid-template-columns: 11rem 1fr 4.5rem 9.5rem; gap: 0.2rem 0.6rem; align-items: center; }
.tilt-track { position: relative; height: 1.2rem; border: 1px solid rgb(128 128 128 / 50%); }
.tilt-bar { height: 100%; background: #949494; }
.tilt-right .tilt-bar { background: repeating-linear-gradient(45deg, #0173b2 0 6px, #56b4e9 6px 9px); }
.tilt-reference { position: absolute; top: -3px; bottom: -3px; width: 3px; margin-left: -1px; background: #d55e00; }
.tilt-value, .tilt-numbers b { font-variant-numeric: tabular-nums; }
.tilt-q, .tilt-beta { display: flex; gap: 0.4rem; align-items: center; }
.tilt-q input { flex: 1; width: 5rem; min-width: 0; }
.tilt-beta { flex-wrap: wrap; }
.tilt-beta label { display: flex; flex: 1 1 18rem; gap: 0.4rem; align-items: center; }
.tilt-beta input { flex: 1; min-width: 0; }
.tilt-shown { min-width: 2.6rem; font-variant-numeric: tabular-nums; }
.tilt button { font: inherit; padding: 0.2rem 0.7rem; cursor: pointer; }
.tilt-numbers { display: flex; flex-wrap: wrap; gap: 0.3rem 1.5rem; margin: 0; font-size: 1rem; }
.tilt-key { margin: 0; font-size: 0.8rem; }
.tilt-said { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); margin: 0; }
@media (max-width: 40em) { .tilt-row { grid-template-columns: 1fr 4.5rem; } .tilt-track { grid-row: 2; } .tilt-value { grid-row: 2; grid-column: 2; } .tilt-q { grid-row: 1; grid-column: 2; justify-self: end; width: 9.5rem; } }`;

  function add(parent, name, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(text);
    return parent.appendChild(made);
  }

  /** A probability for a reader: three decimals, and never a 0 or a 1 that it is not. */
  function shown(p) {
    if (p > 0 && p < 0.0005) return p.toExponential(0);
    return p > 0.9995 && p < 1 ? "> 0.999" : p.toFixed(3);
  }

  /** A slider with its value beside it. Its place is `ends` on a line, and `read` its value. */
  function slider(parent, name, ends, place, read, moved) {
    const label = add(parent, "label", {}, name);
    const [min, max, step] = ends;
    const input = add(label, "input", { type: "range", min, max, step, value: place });
    const text = add(label, "span", { class: "tilt-shown", "aria-hidden": "true" });
    input.addEventListener("input", moved);
    const show = () => {
      text.textContent = read(+input.value).toFixed(2);
      input.setAttribute("aria-valuetext", text.textContent);
    };
    return { label, input, show, get value() { return read(+input.value); } };
  }

  /** Draw the tilt in an element. */
  function mount(element) {
    element.replaceChildren();
    element.classList.add("tilt");
    element.setAttribute("data-on", "");
    add(element, "style", {}, STYLE);
    const reference = START.map((one) => one.reference);
    const reward = START.map((one) => (one.right ? 1 : 0));
    const draw = () => show(false);

    const top = add(element, "div", { class: "tilt-beta" });
    const beta = slider(top, "beta", PLACES, BEGIN, betaAt, () => { stop(); draw(); });
    const play = add(top, "button", { type: "button" }, `Play beta from ${BETA.from} to ${BETA.to}`);
    const reset = add(top, "button", { type: "button" }, "Reset");

    const group = add(element, "fieldset");
    add(group, "legend", {}, "Five completions of a hard problem, and the guide's q of each");
    const rows = START.map((one) => {
      const row = add(group, "div", { class: `tilt-row ${one.right ? "tilt-right" : ""}` });
      const name = add(row, "span", {}, `${one.right ? "✓" : "✗"} ${one.name} ${one.right ? "right" : "wrong"}`);
      if (one.note) name.append(`: ${one.note}`);
      const track = add(row, "div", { class: "tilt-track", "aria-hidden": "true" });
      const bar = add(track, "div", { class: "tilt-bar" });
      add(track, "div", { class: "tilt-reference", style: `left: ${100 * one.reference}%` });
      const value = add(row, "span", { class: "tilt-value" });
      const q = slider(row, "q", [0.1, 4, 0.1], one.q, (at) => at, draw);
      q.label.classList.add("tilt-q");
      q.input.setAttribute("aria-label", `q of completion ${one.name}, ${one.right ? "right" : "wrong"}`);
      return { bar, value, q };
    });

    const numbers = add(element, "p", { class: "tilt-numbers" });
    const number = (name) => add(add(numbers, "span", {}, `${name} `), "b", { "data-number": name });
    const found = ["pass@1", "pass@256", "rho"].map(number);
    const key = "Bar: the optimum, with its probability. Striped and ✓: right. Orange line: the reference.";
    add(element, "p", { class: "tilt-key" }, key);
    const said = add(element, "p", { class: "tilt-said", "aria-live": "polite" });

    /** Draw; with `aloud`, once a slider is let go, a screen reader hears the numbers. */
    function show(aloud) {
      const q = rows.map((row) => row.q.value);
      const policy = optimum(reference, reward, beta.value, q);
      const p = success(policy, reward);
      beta.show();
      rows.forEach((row, i) => {
        row.q.show();
        row.bar.style.width = `${100 * policy[i]}%`;
        row.value.textContent = shown(policy[i]);
      });
      const texts = [shown(p), shown(passAt(p, 256)), rho(reference, reward, q).toFixed(2)];
      texts.forEach((text, i) => { found[i].textContent = text; });
      if (aloud) said.textContent = `pass@1 ${texts[0]}, pass@256 ${texts[1]}, rho ${texts[2]}`;
    }

    let timer = null;
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = `Play beta from ${BETA.from} to ${BETA.to}`;
    }
    function run() {
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      const begin = performance.now();
      const step = () => {
        const done = calm ? 1 : Math.min(1, (performance.now() - begin) / 1000 / SECONDS);
        beta.input.value = 100 * (1 - done);
        if (done === 1) stop();
        show(done === 1);
      };
      play.textContent = "Stop";
      timer = setInterval(step, 40);
      step();
    }
    play.addEventListener("click", () => (timer === null ? run() : stop()));
    reset.addEventListener("click", () => {
      stop();
      beta.input.value = BEGIN;
      rows.forEach((row, i) => { row.q.input.value = START[i].q; });
      show(true);
    });
    element.addEventListener("change", () => show(true));
    draw();
  }

  root.tilt = { optimum, success, passAt, rho, mount, START };

  /** A notebook may run this before it has shown the element. */
  function begin(tries) {
    const there = document.querySelectorAll("[data-tilt]:not([data-on])");
    there.forEach(mount);
    if (!there.length && tries) setTimeout(() => begin(tries - 1), 100);
  }
  if (root.document) begin(20);
})(globalThis);

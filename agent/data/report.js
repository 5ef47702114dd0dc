// Zoom and tooltips for the report. The page is complete without this: it only stretches and labels what is there.
"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const plots = [...document.querySelectorAll("svg.time")];
  const tip = document.getElementById("tip");
  const reset = document.getElementById("reset");
  const svgNamespace = "http://www.w3.org/2000/svg";
  const whole = plots.length ? Number(plots[0].dataset.seconds) : 1;
  let from = 0;
  let to = whole;
  let picking = null;

  const geometry = (svg) => ({ left: Number(svg.dataset.left), inner: Number(svg.dataset.inner) });

  // Position of the pointer in the picture's own units.
  const place = (svg, event) => {
    const box = svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  };

  const timeAt = (svg, x) => {
    const { left, inner } = geometry(svg);
    const part = Math.min(Math.max((x - left) / inner, 0), 1);
    return from + part * (to - from);
  };

  const clock = (seconds, step) => {
    const total = Math.round(seconds);
    const two = (value) => String(value).padStart(2, "0");
    if (step >= 300) return `${Math.floor(total / 3600)}:${two(Math.floor((total % 3600) / 60))}`;
    const text = `${Math.floor(total / 60)}:${two(total % 60)}`;
    return step < 1 ? `${text}.${Math.floor((seconds % 1) * 10)}` : text;
  };

  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

  const drawTicks = (svg) => {
    const { left, inner } = geometry(svg);
    const group = svg.querySelector("g.ticks");
    const y = group.dataset.y || (group.dataset.y = group.firstElementChild.getAttribute("y"));
    const most = Math.max(2, Math.floor(inner / 53));
    const step = steps.find((one) => (to - from) / one <= most) || 86400;
    group.replaceChildren();
    for (let time = Math.ceil(from / step) * step; time <= to + 1e-9; time += step) {
      const label = document.createElementNS(svgNamespace, "text");
      label.setAttribute("class", "tick");
      label.setAttribute("x", left + (inner * (time - from)) / (to - from));
      label.setAttribute("y", y);
      label.setAttribute("text-anchor", "middle");
      label.textContent = clock(time, step);
      group.append(label);
    }
  };

  const zoom = (begin, end) => {
    from = begin;
    to = end;
    for (const svg of plots) {
      const { left, inner } = geometry(svg);
      const factor = whole / (to - from);
      const shift = left - left * factor - (inner * from * factor) / whole;
      for (const group of svg.querySelectorAll("g.data")) {
        group.setAttribute("transform", `matrix(${factor} 0 0 1 ${shift} 0)`);
      }
      for (const label of svg.querySelectorAll("text.phase")) label.toggleAttribute("hidden", factor > 1);
      drawTicks(svg);
    }
    reset.hidden = begin === 0 && end === whole;
  };

  const cursorOf = (svg, name) => {
    let line = svg.querySelector(`.${name}`);
    if (!line) {
      line = document.createElementNS(svgNamespace, name === "cursor" ? "line" : "rect");
      line.setAttribute("class", name);
      line.setAttribute(name === "cursor" ? "y1" : "y", 20);
      const bottom = svg.viewBox.baseVal.height - 38;
      line.setAttribute(name === "cursor" ? "y2" : "height", name === "cursor" ? bottom : bottom - 20);
      svg.append(line);
    }
    return line;
  };

  const show = (svg, event) => {
    const fact = facts[svg.dataset.key];
    const time = timeAt(svg, place(svg, event));
    const bin = Math.min(Math.floor(time / fact.bin), fact.count - 1);
    const lines = fact.series.map((one) => {
      const value = one.values[bin];
      return value === null || value === undefined ? null : `${one.name}: ${value}${fact.unit ? " " + fact.unit : ""}`;
    });
    tip.replaceChildren();
    for (const text of [clock(time, (to - from) / 10), ...lines.filter((line) => line !== null)]) {
      const row = document.createElement("div");
      row.textContent = text;
      tip.append(row);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth - box.width - 6;
    tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, right))}px`;
    tip.style.top = `${Math.max(6, event.clientY - box.height - 12)}px`;
    const { left, inner } = geometry(svg);
    const part = (time - from) / (to - from);
    for (const other of plots) {
      if (!other.getClientRects().length) continue;
      const size = geometry(other);
      const x = size.left + size.inner * part;
      const line = cursorOf(other, "cursor");
      line.removeAttribute("hidden");
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    return { left, inner };
  };

  const hide = () => {
    tip.hidden = true;
    for (const line of document.querySelectorAll(".cursor")) line.setAttribute("hidden", "");
  };

  for (const svg of plots) {
    svg.addEventListener("pointerdown", (event) => {
      picking = { svg, x: place(svg, event) };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      show(svg, event);
      if (!picking || picking.svg !== svg) return;
      const x = place(svg, event);
      const box = cursorOf(svg, "picked");
      box.setAttribute("x", Math.min(x, picking.x));
      box.setAttribute("width", Math.abs(x - picking.x));
    });
    svg.addEventListener("pointerup", (event) => {
      if (!picking) return;
      const x = place(svg, event);
      const [begin, end] = [picking.x, x].sort((a, b) => a - b).map((edge) => timeAt(svg, edge));
      if (Math.abs(x - picking.x) > 8 && end - begin > whole / 20000) zoom(begin, end);
      picking = null;
      svg.querySelector(".picked")?.remove();
      if (event.pointerType !== "touch") show(svg, event);
    });
    svg.addEventListener("pointercancel", () => {
      picking = null;
      svg.querySelector(".picked")?.remove();
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("dblclick", () => zoom(0, whole));
  }
  reset.addEventListener("click", () => zoom(0, whole));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(0, whole);
  });
  document.documentElement.dataset.ready = "yes";
})();

(() => {
  const tip = document.createElement("div"), hair = document.createElement("div");
  tip.className = "tip"; hair.className = "hair";
  const short = (v, unit) => {
    if (unit === "%") return +(100 * v).toPrecision(3) + "%";
    const size = Math.abs(v);
    for (const [p, l] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= p) return +(v / p).toPrecision(4) + l + (unit === "bytes" ? "B" : unit);
    return (size && size < 1e-3 ? v.toExponential(2) : +v.toPrecision(4)) + (unit === "bytes" ? "B" : unit);
  };
  const pair = text => text.split(" ").map(Number);
  const at = (share, [low, high], log) => log ? low * (high / low) ** share : low + share * (high - low);
  const points = path => path.points ??= [...path.getAttribute("d").matchAll(/(-?\d+),(-?\d+)/g)].map(m => [+m[1], +m[2]]);
  const row = (name, value, color) => {
    const line = document.createElement("div"), label = document.createElement("span"), number = document.createElement("b");
    label.textContent = name; label.className = color; number.textContent = value;
    line.append(label, number);
    return line;
  };
  const extremes = (figure, path, place, value) => {
    const color = path.getAttribute("class").replace("line ", "");
    const band = [...figure.querySelectorAll(".band")].filter(b => b.getAttribute("class") === "band " + color);
    const ys = band.flatMap(points).filter(p => p[0] === place).map(p => p[1]);
    return ys.length ? ` (${value(Math.max(...ys))} to ${value(Math.min(...ys))})` : "";
  };
  const curves = (figure, share) => {
    const {x, y, log, unit, name, stacked} = figure.dataset, rows = [];
    let place = null, below = 1000;
    for (const path of figure.querySelectorAll("path[data-n]")) {
      let near = null;
      for (const p of points(path)) if (!near || Math.abs(p[0] - share * 1000) < Math.abs(near[0] - share * 1000)) near = p;
      if (!near || Math.abs(near[0] - share * 1000) > 60) continue;
      place ??= near[0] / 1000;
      const text = down => short(at(1 - down / 1000, pair(y), +log), unit);
      const part = (below - near[1]) / 1000 * (pair(y)[1] - pair(y)[0]);
      below = near[1];
      const shown = stacked ? short(part, unit) : text(near[1]) + extremes(figure, path, near[0], text);
      rows.push(row(path.dataset.n, shown, path.getAttribute("class").replace("line", "")));
    }
    if (!rows.length) return [place, rows];
    let where = Math.round(at(place, pair(x))).toLocaleString("en");
    if (figure.dataset.ticks) {
      const away = tick => Math.abs(parseInt(tick) - place * 1000);
      where = figure.dataset.ticks.split(";").reduce((a, b) => away(b) < away(a) ? b : a).split(" ")[1];
    }
    return [place, [row(name, where, ""), ...rows]];
  };
  const heat = (figure, share, down) => {
    const {x, y, log, unit, name, row: kind, columns} = figure.dataset;
    const rows = figure.dataset.rows.split(","), values = figure.values ??= atob(figure.dataset.v);
    const width = values.length / rows.length, r = Math.min(rows.length - 1, Math.floor(down * rows.length));
    const c = Math.min(width - 1, Math.floor(share * width)), level = values.charCodeAt(r * width + c);
    const where = columns ? columns.split(";")[c] : Math.round(at((c + .5) / width, pair(x))).toLocaleString("en");
    const value = level ? short(at((level - 1) / 254, pair(y), +log), unit) : "–";
    return [(c + .5) / width, [row(name, where, ""), row(`${kind} ${rows[r]}`, value, "")]];
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const figure = plot.parentElement;
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const down = Math.min(1, Math.max(0, (event.clientY - box.top) / box.height));
      const [place, rows] = figure.classList.contains("heat") ? heat(figure, share, down) : curves(figure, share);
      if (!rows.length) return;
      hair.style.left = 100 * place + "%";
      tip.replaceChildren(...rows);
      tip.classList.toggle("under", box.width < 480);
      tip.style.left = share > .5 ? "auto" : `calc(${100 * share}% + 14px)`;
      tip.style.right = share > .5 ? `calc(${100 - 100 * share}% + 14px)` : "auto";
      plot.append(hair, tip);
    });
    plot.addEventListener("pointerleave", () => { hair.remove(); tip.remove(); });
  }
})();

// Shows the values under the pointer. The charts are complete without it.
(() => {
  const tip = document.getElementById("tip");
  const short = (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4)));

  // Index of the point nearest to x; for counts, of the last change before it.
  const nearest = (xs, x, before) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle - 1;
    }
    return !before && low + 1 < xs.length && xs[low + 1] - x < x - xs[low] ? low + 1 : low;
  };

  const line = (color, text) => {
    const row = document.createElement("div");
    if (color) {
      const dot = document.createElement("i");
      dot.style.background = `var(--${color})`;
      row.append(dot);
    }
    row.append(text);
    return row;
  };

  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    const chart = JSON.parse(svg.dataset.hover);
    const [left, right, top, bottom] = chart.box, [from, to] = chart.x;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", top);
    cursor.setAttribute("y2", bottom);
    cursor.style.display = "none";
    svg.append(cursor);

    const show = (event) => {
      const place = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / place.width;
      const at = Math.min(right, Math.max(left, (event.clientX - place.left) * scale));
      const x = from + (at - left) / (right - left) * (to - from);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.style.display = "";
      const rows = [line(null, `${chart.xLabel} ${short(x)}`)];
      for (const series of chart.series) rows.push(line(series.color, `${series.label} ${short(series.y[nearest(series.x, x, series.steps)])}`));
      for (const mark of chart.marks) if (Math.abs(mark.x - x) < (to - from) * 0.012) rows.push(line(mark.color, mark.label));
      tip.replaceChildren(...rows);
      tip.hidden = false;
      const gap = 14, wide = tip.offsetWidth;
      const flipped = event.clientX + gap + wide > document.documentElement.clientWidth;
      tip.style.left = `${Math.max(4, flipped ? event.clientX - gap - wide : event.clientX + gap) + scrollX}px`;
      tip.style.top = `${event.clientY + scrollY - tip.offsetHeight - 8}px`;
    };
    const hide = () => { tip.hidden = true; cursor.style.display = "none"; };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
})();

// KV blocks as a map: cells in the order used, cached, free. Their counts are exact in the legend;
// with more blocks than cells, each cell stands for several.
const MOST = 1024;
const MOST_ON_A_PHONE = 384;
const STATES = [
  ["used", "blocks_used", "in use"],
  ["cached", "blocks_cached", "cached"],
  ["free", "blocks_free", "free"],
];
const GAP = 2;

/** Cells of each state; a state that has any block has a cell. They sum to `cells`. */
export function shares(counts, cells) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const found = counts.map((count) => (count ? Math.max(1, Math.floor((count * cells) / total)) : 0));
  const largest = found.indexOf(Math.max(...found));
  found[largest] += cells - found.reduce((sum, count) => sum + count, 0);
  return found;
}

export function drawBlocks(canvas, legend, engine) {
  const counts = STATES.map(([, name]) => engine[name]);
  const total = engine.blocks_total;
  if (!total) return;
  const style = getComputedStyle(canvas);
  const width = canvas.clientWidth;
  const cells = Math.min(width < 500 ? MOST_ON_A_PHONE : MOST, total);
  const columns = Math.max(16, Math.min(cells, Math.floor(width / 13)));
  const size = width / columns;
  const rows = Math.ceil(cells / columns);
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${rows * size}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * size * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  let cell = 0;
  shares(counts, cells).forEach((count, index) => {
    context.fillStyle = style.getPropertyValue(`--kv-${STATES[index][0]}`);
    for (let i = 0; i < count; i++, cell++) {
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      context.beginPath();
      context.roundRect(x, y, size - GAP, size - GAP, 2);
      context.fill();
    }
  });
  describe(canvas, legend, counts, total, cells);
}

function describe(canvas, legend, counts, total, cells) {
  const texts = STATES.map(([, , label], index) => `${counts[index].toLocaleString("en")} ${label}`);
  const each = Math.round(total / cells);
  canvas.setAttribute("aria-label", `KV blocks: ${texts.join(", ")}`);
  legend.replaceChildren(
    ...texts.map((text, index) => {
      const item = document.createElement("span");
      item.className = `key ${STATES[index][0]}`;
      item.textContent = text;
      return item;
    }),
  );
  if (each > 1) legend.append(`a cell is about ${each} blocks`);
}

// Prepares an image for the model, bit for bit as Python does: Pillow's resize of the shorter side, torchvision's centre
// crop, then normalisation in float32. Only the pixels of the crop are computed. (Pillow resizes very tall images along y
// first, which may change a byte by one.)

const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, hamming],
  bicubic: [2, bicubic],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
const BITS = 22; // Pillow's fixed-point precision for 8-bit images
const STRIP = 64; // rows read at once, so that a large photograph is not copied whole

function bicubic(x) {
  x = Math.abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

function hamming(x) {
  x = Math.abs(x);
  if (x >= 1) return 0;
  return sinc(x) * (Math.fround(0.54) + Math.fround(0.46) * Math.cos(x * Math.PI));
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI);
}

// Python's round: halves go to the even neighbour.
function roundHalfToEven(x) {
  const below = Math.floor(x);
  if (x - below !== 0.5) return Math.round(x);
  return below % 2 === 0 ? below : below + 1;
}

// The part of an image that the model sees: the size after resizing, and the corner of the crop in it.
function geometry(width, height, spec) {
  const shorter = Math.min(width, height);
  const longer = Math.trunc((spec.resize * Math.max(width, height)) / shorter);
  const [w, h] = width <= height ? [spec.resize, longer] : [longer, spec.resize];
  return { width: w, height: h, left: roundHalfToEven((w - spec.size) / 2), top: roundHalfToEven((h - spec.size) / 2) };
}

// The weights of input pixels for output pixels `first` to `first + count` (exclusive) along a side.
function sideWeights(input, output, first, count, name) {
  const [reach, filter] = FILTERS[name];
  const scale = input / output;
  const stretch = Math.max(scale, 1);
  const support = reach * stretch;
  return Array.from({ length: count }, (_, i) => {
    const centre = (first + i + 0.5) * scale;
    const start = Math.max(0, Math.trunc(centre - support + 0.5));
    const end = Math.min(input, Math.trunc(centre + support + 0.5));
    const weights = Array.from({ length: end - start }, (_, k) => filter((k + start - centre + 0.5) * (1 / stretch)));
    const sum = weights.reduce((a, b) => a + b, 0);
    const fixed = weights.map((weight) => {
      const value = (weight / sum) * 2 ** BITS;
      return Math.trunc(value < 0 ? value - 0.5 : value + 0.5);
    });
    return { start, weights: Int32Array.from(fixed) };
  });
}

function toByte(sum) {
  return Math.min(255, Math.max(0, sum >> BITS));
}

// The crop as bytes, three per pixel. `readRows(top, count)` returns rows of the image, four bytes per pixel.
function cropPixels(readRows, width, height, spec) {
  const { size } = spec;
  const to = geometry(width, height, spec);
  const columns = sideWeights(width, to.width, to.left, size, spec.interpolation);
  const rows = sideWeights(height, to.height, to.top, size, spec.interpolation);
  const firstRow = rows[0].start;
  const lastRow = rows[size - 1].start + rows[size - 1].weights.length;
  const narrow = new Uint8Array((lastRow - firstRow) * size * 3); // resized along x, rounded as Pillow rounds it
  for (let top = firstRow; top < lastRow; top += STRIP) {
    const count = Math.min(STRIP, lastRow - top);
    const source = readRows(top, count);
    for (let y = 0; y < count; y++) {
      let at = (top - firstRow + y) * size * 3;
      for (const { start, weights } of columns) {
        let red = 1 << (BITS - 1);
        let green = red;
        let blue = red;
        for (let k = 0, from = (y * width + start) * 4; k < weights.length; k++, from += 4) {
          red += source[from] * weights[k];
          green += source[from + 1] * weights[k];
          blue += source[from + 2] * weights[k];
        }
        narrow[at++] = toByte(red);
        narrow[at++] = toByte(green);
        narrow[at++] = toByte(blue);
      }
    }
  }
  const pixels = new Uint8Array(size * size * 3);
  rows.forEach(({ start, weights }, y) => {
    for (let x = 0; x < size * 3; x++) {
      let sum = 1 << (BITS - 1);
      for (let k = 0, from = (start - firstRow) * size * 3 + x; k < weights.length; k++, from += size * 3) {
        sum += narrow[from] * weights[k];
      }
      pixels[y * size * 3 + x] = toByte(sum);
    }
  });
  return pixels;
}

// Bytes (H, W, 3) -> normalised float32 (3, H, W).
function normalise(pixels, spec) {
  const area = spec.size * spec.size;
  const values = new Float32Array(3 * area);
  for (let channel = 0; channel < 3; channel++) {
    const [mean, std] = [Math.fround(spec.mean[channel]), Math.fround(spec.std[channel])];
    for (let i = 0; i < area; i++) {
      values[channel * area + i] = Math.fround(Math.fround(pixels[3 * i + channel] / 255) - mean) / std;
    }
  }
  return values;
}

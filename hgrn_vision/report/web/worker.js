// Runs the model in a worker, so that the page stays responsive. It fetches nothing: the page hands it everything.

let session = null;
let runtime = null;
let spec = null;

// The bitmap's rows on white, as Python shows transparent images to the model.
function rowReader(bitmap) {
  const canvas = new OffscreenCanvas(bitmap.width, STRIP);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  return (top, count) => {
    context.fillStyle = "white";
    context.fillRect(0, 0, bitmap.width, count);
    context.drawImage(bitmap, 0, top, bitmap.width, count, 0, 0, bitmap.width, count);
    return context.getImageData(0, 0, bitmap.width, count).data;
  };
}

function imageTensor(values) {
  return new runtime.Tensor("float32", values, [1, 3, spec.size, spec.size]);
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return Float32Array.from(powers, (power) => power / sum);
}

const actions = {
  async load(message) {
    spec = message.spec;
    const address = URL.createObjectURL(new Blob([message.module], { type: "text/javascript" }));
    runtime = await import(address);
    URL.revokeObjectURL(address);
    runtime.env.wasm.wasmBinary = message.wasm;
    // more threads need headers that static hosts do not send, and would load this module again by its address
    runtime.env.wasm.numThreads = 1;
    session = await runtime.InferenceSession.create(new Uint8Array(message.model), { executionProviders: ["wasm"] });
    // the first run takes longer than the others; done here, it does not distort the time of the first answer
    await session.run({ pixel_values: imageTensor(new Float32Array(3 * spec.size * spec.size)) });
    return {};
  },

  async classify({ bitmap }) {
    const began = performance.now();
    const pixels = cropPixels(rowReader(bitmap), bitmap.width, bitmap.height, spec);
    bitmap.close();
    const input = imageTensor(normalise(pixels, spec));
    const prepared = performance.now();
    const { logits } = await session.run({ pixel_values: input });
    const probabilities = softmax(logits.data);
    return { probabilities, preparing: prepared - began, computing: performance.now() - prepared };
  },
};

self.onmessage = async ({ data }) => {
  try {
    self.postMessage({ id: data.id, result: await actions[data.action](data) });
  } catch (error) {
    self.postMessage({ id: data.id, error: String(error?.message ?? error) });
  }
};

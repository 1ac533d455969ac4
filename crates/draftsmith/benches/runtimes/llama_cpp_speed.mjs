// Tokens a second of llama.cpp's greedy decoding, plain and drafted, each prompt both ways in turn.
//
//   node llama_cpp_speed.mjs TARGET.gguf DRAFT.gguf PROMPTS.json MOST MIN_CONFIDENCE
//
// PROMPTS.json is a list of {"prompt_ids": [...], "num_tokens": N}: `draft_model_speed.py` writes it. Needs the package
// `node-llama-cpp`, whose predictor drafts at most MOST tokens and stops below MIN_CONFIDENCE. Prints how many prompts were
// answered alike and the two speeds.
import {readFileSync} from "node:fs";
import {DraftSequenceTokenPredictor, getLlama} from "node-llama-cpp";

const [target, draft, prompts, most, confidence] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 2});
const model = await llama.loadModel({modelPath: target});
const draftModel = await llama.loadModel({modelPath: draft});
const size = {contextSize: 1024, threads: 2};
const contexts = {plain: await model.createContext(size), drafted: await model.createContext(size)};
const draftContext = await draftModel.createContext(size);
const tokenPredictor = new DraftSequenceTokenPredictor(draftContext.getSequence(), {
    minTokens: 0, maxTokens: Number(most), minConfidence: Number(confidence),
});
const sequences = {
    plain: contexts.plain.getSequence(),
    drafted: contexts.drafted.getSequence({tokenPredictor}),
};
const seconds = {plain: 0, drafted: 0};
let tokens = 0, alike = 0;
const all = JSON.parse(readFileSync(prompts));
for (const {prompt_ids: ids, num_tokens: count} of all) {
    const found = {};
    for (const way of ["plain", "drafted"]) {
        await sequences[way].clearHistory();
        const begun = performance.now();
        found[way] = [];
        for await (const token of sequences[way].evaluate(ids, {temperature: 0})) {
            found[way].push(token);
            if (found[way].length === count) break;
        }
        seconds[way] += (performance.now() - begun) / 1000;
    }
    tokens += count;
    alike += found.plain.join() === found.drafted.join() ? 1 : 0;
}
const [plain, drafted] = [tokens / seconds.plain, tokens / seconds.drafted];
console.log(`llama.cpp: ${all.length} prompts, ${alike} alike; plain ${plain.toFixed(1)} tokens/s, drafted ` +
    `${drafted.toFixed(1)}: ${(drafted / plain).toFixed(2)}x`);
process.exit(0);

use draftsmith_decode::*;
use draftsmith_model::*;
use draftsmith_theory::*;
use std::ops::ControlFlow;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let d = burn::tensor::Device::flex();
    let t = CausalLm::from_model_dir(std::path::Path::new(&a[1]), &d).unwrap();
    let q = CausalLm::from_model_dir(std::path::Path::new(&a[2]), &d).unwrap();
    let v = t.config().vocab_size;
    let prompt: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % (v as u32)).collect();
    let limits = Limits { max_new_tokens: 128, eos_token_ids: vec![] };
    let mut draws = SeededDraws::new(1, &["x"]);
    let mut s = ModelSession::new(&t, 256, "target");
    let mut dr = SeparateDraft::new(&q, None, v, 256);
    for rep in 0..3 {
        let p = decode_plain(&mut s, &Decoding::Greedy, &prompt, &limits, &mut draws, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let secs = p.trace.decode_time().as_secs_f64();
        println!("plain {:.0} tok/s prefill {:?}", 128.0 / secs, p.trace.prefill_time);
        for k in [1, 2, 4, 6, 8] {
            let mut rule = FixedLength::new(k).unwrap();
            let g = decode_speculative(
                &mut s,
                &mut dr,
                &mut rule,
                &Decoding::Greedy,
                &prompt,
                &limits,
                &mut draws,
                &mut |_| ControlFlow::Continue(()),
            )
            .unwrap();
            assert_eq!(g.token_ids, p.token_ids);
            let c = g.trace.counts();
            println!(
                "rep{rep} K={k} {:.0} tok/s; draft {:.0}us/fwd verify {:.0}us/fwd cr {:.2}",
                128.0 / g.trace.decode_time().as_secs_f64(),
                g.trace.draft_time().as_secs_f64() * 1e6 / c.num_draft_forwards as f64,
                g.trace.verify_time().as_secs_f64() * 1e6 / c.num_target_forwards as f64,
                c.compression_rate()
            );
        }
    }
}

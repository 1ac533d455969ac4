use burn::tensor::*; use std::time::Instant;
fn med(name:&str, reps: usize, mut f: impl FnMut(usize)) { let mut v=vec![]; for r in 0..9 { let t=Instant::now(); for i in 0..reps {f(i);} if r>0 {v.push(t.elapsed().as_secs_f64()*1e6/reps as f64);} } v.sort_by(f64::total_cmp); print!("  {name} {:7.1}/{:7.1}", v[0], v[v.len()/2]); }
fn main(){
 let d = Device::flex();
 for (k,n) in [(256usize,688usize),(688,256),(256,256),(192,512),(256,4096)] {
  let copies = (24<<20)/(k*n*4)+1; 
  let ws: Vec<_> = (0..copies).map(|_| Tensor::<2>::random([k,n], Distribution::Default, &d)).collect();
  let wts: Vec<_> = (0..copies).map(|_| Tensor::<2>::random([n,k], Distribution::Default, &d)).collect();
  println!("k={k} n={n} copies={copies}");
  for m in [1usize,2,4,6,8,12] {
   let x = Tensor::<2>::random([m,k], Distribution::Default, &d);
   print!("m={m:2}");
   med("plain", copies, |i| { let _ = x.clone().matmul(ws[i].clone()); });
   med("xWT", copies, |i| { let _ = x.clone().matmul(wts[i].clone().transpose()); });
   med("few", copies, |i| { let _ = draftsmith_model::few_rows_matmul(x.clone(), ws[i].clone()); });
   println!();
  }
 }
}

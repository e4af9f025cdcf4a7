import sys, numpy as np
f=np.load(sys.argv[1]); raw=f["raw"].astype(np.int64); prods=f["products"]
PH={1:"QKV",3:"OUT",4:"GU",5:"DOWN"}
t0=raw[:,:32][raw[:,:32]>0].min()
def T(a): return np.where(a>0,(a-t0)/1000.0,np.nan)
n=len(prods)
beg=T(raw[:,44:56]); fe=T(raw[:,8:20]); dn=T(raw[:,20:32]); rounds=raw[:,32:44]; mu=T(raw[:,1]); pu=T(raw[:,2])
lo,hi=(int(x) for x in sys.argv[2].split("-")) if len(sys.argv)>2 else (50,62)
for i in range(lo,min(hi,n)):
    ph,l,lane=prods[i]
    b=beg[:,:,i]; a=fe[:,:,i]; d=dn[:,:,i]
    print(f"{i:3d} {PH.get(int(ph)):5s}L{l:2d} l{lane} beg mean {b.mean():7.2f} | warp fetch: mean {a.mean():7.2f} min {a.min():7.2f} max {a.max():7.2f}; per-CTA first {a.min(1).mean():7.2f} last {a.max(1).mean():7.2f} | done(last warp) {d.max(1).mean():7.2f} own work {np.mean(d-a):5.2f} | mult {mu[:,i].mean():7.2f} pub {pu[:,i].mean():7.2f} max {pu[:,i].max():7.2f} | rounds mean {rounds[:,:,i].mean():.2f} max {rounds[:,:,i].max()}  rnd0 {np.mean(rounds[:,:,i]==0):.2f}")
# aggregates by phase over layers 3..13
print("phase: poll start->fetch mean, in-CTA spread, fetch->done per warp, last done->mult, mult->pub, pub spread(max-mean), prev pub max -> first fetch")

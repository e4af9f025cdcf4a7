import sys, numpy as np
f=np.load(sys.argv[1]); raw=f["raw"].astype(np.int64); prods=f["products"]
def T(a): return np.where(a>0,(a-raw[raw>10**12].min())/1000.0,np.nan)
for name,k in (("fetched",0),("multiplied",1),("published",2)):
    t=T(raw[:,k,:])[:, 24:116]
    dev=t-np.nanmean(t,axis=0,keepdims=True)
    m=np.nanmean(dev,axis=1); s=np.nanstd(dev-m[:,None])
    print(name,"per-CTA mean offsets: std %.3f min %.2f max %.2f; residual std %.3f"%(m.std(),m.min(),m.max(),s))
    o=np.argsort(m); print("  earliest",[(int(i),round(float(m[i]),2)) for i in o[:6]],"latest",[(int(i),round(float(m[i]),2)) for i in o[-8:]])
    # by phase
    for ph,nm in ((1,"QKV"),(3,"OUT"),(4,"GU"),(5,"DOWN")):
        idx=[i for i in range(24,116) if prods[i][0]==ph]
        d=T(raw[:,k,:])[:,idx]; d=d-np.nanmean(d,axis=0,keepdims=True)
        print("   ",nm,"per-CTA std %.3f residual %.3f mean of max %.2f"%(np.nanmean(d,axis=1).std(), np.nanstd(d-np.nanmean(d,axis=1)[:,None]), np.nanmean(np.nanmax(d,axis=0))))
